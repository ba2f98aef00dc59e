"""Train what a study asks for, keep each run in a file, and compare the losses over the same seeds."""

import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import Any

from topk_registry.train import TrainConfig, Trainer
from topk_studies.studies import Study

TUNING_SEED = 1000
Measured = dict[str, float]


def train(flags: Mapping[str, Any]) -> Measured:
    """Train once, and return the measures of the last epoch."""
    with tempfile.TemporaryDirectory() as folder:
        result = Trainer(TrainConfig(**flags, output=folder), quiet=True).fit()
    row = result.history[-1]
    return {key.removeprefix("eval_"): float(value) for key, value in row.items() if key.startswith("eval_")}


class Runs:
    """Runs by their flags, kept in a file of one JSON object per line; a run that is there is not repeated.

    Args:
        path: the file.
        train: trains one run.
        said: called with a line about each new run.
    """

    def __init__(
        self,
        path: Path,
        train: Callable[[Mapping[str, Any]], Measured] = train,
        said: Callable[[str], object] = lambda line: None,
    ) -> None:
        self.path, self.train, self.said = path, train, said
        self.done: dict[str, Measured] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                try:
                    row = json.loads(line)
                except ValueError:  # half a line, from a run that was killed while it wrote
                    continue
                self.done[_key(row["flags"])] = row["measured"]

    def __call__(self, flags: Mapping[str, Any]) -> Measured:
        key = _key(flags)
        if key not in self.done:
            self.done[key] = self.train(flags)
            whole = not self.path.exists() or self.path.read_text().endswith("\n")
            with self.path.open("a") as file:
                file.write(("" if whole else "\n") + json.dumps({"flags": flags, "measured": self.done[key]}) + "\n")
            self.said(f"{len(self.done)} runs: {flags['loss']} {flags['loss_opt']} lr={flags['lr']} {flags['seed']}")
        return self.done[key]


def _key(flags: Mapping[str, Any]) -> str:
    return json.dumps(flags, sort_keys=True)


def run(study: Study, base: Mapping[str, Any], seeds: Sequence[int], runs: Runs) -> list[dict[str, Any]]:
    """Run a study.

    Args:
        study: what to train.
        base: flags of the data, network and schedule.
        seeds: seeds of the results.
        runs: where runs are kept.

    Returns:
        one row per condition and loss: the chosen trial, and for each metric the mean and, from the second loss on,
        the mean and the 95 % half-width of the paired difference from the first.
    """
    rows: list[dict[str, Any]] = []
    for condition, options in study.conditions.items():
        first: dict[str, list[float]] = {}
        for contestant in study.contestants:
            shared = {**base, "dataset_opt": {**base.get("dataset_opt", {}), **options}}
            trials = [{**shared, **trial} for trial in contestant.trials()]
            tuned = [runs({**trial, "seed": TUNING_SEED, "val_split": "validation"}) for trial in trials]
            best = max(range(len(trials)), key=lambda i: tuned[i][study.metric])
            found = [runs({**trials[best], "seed": seed, "val_split": "test"}) for seed in seeds]
            row: dict[str, Any] = {"condition": condition, "loss": contestant.name, "chosen": contestant.trials()[best]}
            for metric in study.metrics:
                values = [one[metric] for one in found]
                row[metric] = {"mean": fmean(values)}
                if metric in first:
                    row[metric] |= paired(values, first[metric])
                else:
                    first[metric] = values
            rows.append(row)
    return rows


def paired(values: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """Return the mean difference and, of several pairs, the half-width of its 95 % interval (Student's t).

    Example:
        >>> {key: round(value, 2) for key, value in paired([2.0, 3.0, 5.0], [1.0, 1.0, 2.0]).items()}
        {'difference': 2.0, 'half_width': 2.48}
    """
    differences = [value - other for value, other in zip(values, others, strict=True)]
    if len(differences) < 2:
        return {"difference": differences[0]}
    half = _student(len(differences) - 1) * stdev(differences) / math.sqrt(len(differences))
    return {"difference": fmean(differences), "half_width": half}


def _student(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t."""
    small = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
    if degrees <= len(small):
        return small[degrees - 1]
    z = NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
