"""Berrada Tables 3 and 4, Garcin Figure 3: how long a loss takes, against the number of classes and against k.

Every contestant takes its turn in every round, so that a disturbance hits all alike; figures are medians of the rounds.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from topk_studies.baselines.algorithms import (
    ALGORITHM_2,
    AUTHORS,
    CONTESTANTS,
    DIVIDE,
    NEURALSORT,
    PEERS,
    PLAIN,
    PYTOPK,
    SUMMATION,
)
from topk_studies.engine import registered
from topk_studies.engine.study import Configuration, Options, Progress, Record
from topk_studies.experiments.speed_findings import AGAINST_K, findings
from topk_studies.timing.contest import CROSS_ENTROPY, OURS, Case, Contestant, Loss
from topk_studies.timing.machine import busy, cpu_name, usable
from topk_studies.timing.measure import Row, measure
from topk_studies.timing.rounds import Spread

TITLE = "Speed"
QUESTION = "What does a forward and a backward pass cost, against the number of classes and against k?"
REFERENCE = "Berrada, Zisserman, Kumar 2018, Tables 3 and 4; Garcin, Servajean, Joly, Salmon 2022, Figure 3"
RUNS = "speed"
VERSION = 1
ALONE = True

CLASSES = (100, 1000, 10_000, 100_000)
KS = (1, 2, 5, 10, 20, 50)
AGAINST_CLASSES = (CROSS_ENTROPY, OURS, PLAIN, SUMMATION, DIVIDE, ALGORITHM_2, AUTHORS)
PEERS_AGAINST_K = (CROSS_ENTROPY, ALGORITHM_2, AUTHORS, PYTOPK, NEURALSORT)

report = findings


def configurations(options: Options, known: Sequence[Record]) -> list[Configuration]:
    small = options.budget != "paper"
    shared = {"tau": 1.0, "dtype": "float32", "device": usable(options.device), "repeats": 15 if small else 50}
    names = list(options.losses or AGAINST_K)
    # on this many classes a published algorithm takes some gigabytes, and the summation ten seconds a pass
    sizes = [(n, 64 if small and n > 10_000 else 256, 10.0 if small and n <= 10_000 else 40.0) for n in CLASSES]
    return [
        *(
            {"sweep": "n", "n": n, "B": B, "k": 5, "limit": limit, "contestants": list(AGAINST_CLASSES), **shared}
            for n, B, limit in sizes
        ),
        *(
            {
                "sweep": "k",
                "n": 1000,
                "B": 256,
                "k": k,
                "limit": 10.0,
                "contestants": [*names, *PEERS_AGAINST_K],
                **shared,
            }
            for k in (KS if small else (*KS, 100))
        ),
    ]


def run(configuration: Configuration, work: Path, progress: Progress) -> dict[str, Any]:
    """Seconds of each contestant's forward and backward pass, their quartiles, and of the machine what matters."""
    c = configuration
    case = Case(c["B"], c["n"], c["k"], {"tau": c["tau"]}, device=c["device"], dtype=getattr(torch, c["dtype"]))
    chosen = [_contestant(name) for name in c["contestants"]]
    total, done = len(chosen) * (1 + c["repeats"]), 0

    def tick(name: str, count: int) -> None:
        nonlocal done
        done += count
        progress(min(done / total, 1.0), name)

    load = busy()
    rows, interrupted = measure(case, chosen, repeats=c["repeats"], limit=c["limit"], memory=False, tick=tick)
    if interrupted:
        raise KeyboardInterrupt
    return {
        "times": {row.contestant: _times(row) for row in rows},
        "threads": torch.get_num_threads(),
        "busy": load,
        "processor": torch.cuda.get_device_name(c["device"]) if c["device"] != "cpu" else cpu_name(),
    }


def _contestant(name: str) -> Contestant:
    """One of the table, or a registered loss by its name."""
    return CONTESTANTS.get(name) or PEERS.get(name) or _registered(name)


def _registered(name: str) -> Contestant:
    """A registered loss, with k and tau where it takes them."""

    def build(case: Case) -> Loss:
        loss = registered.build(name, class_counts=[100] * case.n, k=case.k, tau=case.options["tau"])
        return loss.to(case.device) if isinstance(loss, nn.Module) else loss

    return Contestant(name, build)


def _times(row: Row) -> dict[str, Any]:
    spreads: dict[str, Spread | None] = {"forward": row.forward, "backward": row.backward, "both": row.both}
    times = {name: asdict(spread) for name, spread in spreads.items() if spread}
    return {**times, "repeats": row.repeats, "problem": row.problem}
