"""Garcin Figures 1 and 6: level sets of every registered loss on the 2-simplex, and what eps and B change.

Scores s = scale p with p on the 2-simplex, three classes, the label fixed. Any callable (logits, target) will do: one
that does not keep its rows apart is asked for a point at a time. A random one is averaged over many draws.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from topk_registry import registry
from topk_studies.engine import registered
from topk_studies.engine.study import Configuration, Options, Progress, Record
from topk_studies.experiments.landscape_findings import DRAWS, EPSILONS, NOISED, REPLICATIONS, SHAPE, findings, grid

TITLE = "Landscapes"
QUESTION = "What does each loss look like where three scores trade off, and what do eps and B change?"
REFERENCE = "Garcin, Servajean, Joly, Salmon 2022, Figures 1 and 6"
RUNS = "landscape"
VERSION = 2
ALONE = False

report = findings


def configurations(options: Options, known: Sequence[Record]) -> list[Configuration]:
    shape = dict(SHAPE) if options.budget == "small" else {**SHAPE, "divisions": 60}
    plain = [
        {"loss": name, "options": {}, **shape, "replications": REPLICATIONS}
        for name in options.losses or registry.list_losses()
    ]
    # one evaluation a point shows what a training step sees; the mean of many, the function that it estimates
    noised = [
        {"loss": NOISED, "options": {"epsilon": epsilon, "num_samples": B}, **shape, "replications": replications}
        for epsilon in EPSILONS
        for B, replications in (*((B, 1) for B in DRAWS), (DRAWS[-1], REPLICATIONS))
    ]
    return [*plain, *noised]


def run(configuration: Configuration, work: Path, progress: Progress) -> dict[str, Any]:
    """The loss at every point of the grid and whether it is random; of a loss that takes no three scores, why."""
    c = configuration
    torch.manual_seed(0)
    try:
        loss = registered.build(c["loss"], class_counts=c["class_counts"], k=c["k"], **c["options"])
        label = torch.tensor([c["label"]])
        scores = c["scale"] * torch.tensor(grid(c["divisions"]))
        with torch.no_grad():
            random = _is_random(loss, scores, label)
            values = [] if random else registered.each_row(loss, scores, label.expand(len(scores))).tolist()
            rows = c["replications"]
            for i, s in enumerate(scores if random else ()):
                progress(i / len(scores), "")
                if rows > 1:
                    torch.default_generator.manual_seed(0)  # the same draws everywhere: the surface stays smooth
                values.append(float(loss(s.expand(rows, -1).contiguous(), label.expand(rows).contiguous())))
    except (ValueError, TypeError, RuntimeError) as error:
        return {"problem": f"{type(error).__name__}: {error}".splitlines()[0]}
    if not all(map(math.isfinite, values)):
        return {"problem": "it is not finite everywhere on the simplex"}
    return {"values": [round(value, 6) for value in values], "random": random}


def _is_random(loss: registered.Loss, scores: Tensor, label: Tensor) -> bool:
    with torch.no_grad():
        return any(float(loss(s[None], label)) != float(loss(s[None], label)) for s in scores[::37])
