"""Train the runs of a study, store the metrics of each run in a file, and compare the losses over the same seeds."""

import hashlib
import json
import math
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import Any, NamedTuple

from topk_registry.errors import Interrupted, NonFiniteLossError
from topk_registry.registry.discovery import installed_version
from topk_registry.train import TrainConfig, Trainer
from topk_registry.train.config import DECREASING
from topk_studies.studies import Contestant, Flags, Study

TUNING_SEED = 1000  # seed of the trials; no result uses this seed
Measured = dict[str, float]  # metrics of a run; empty if the loss became NaN or infinite


def train(flags: Flags) -> Measured:
    """Train one run and return the validation metrics of the last epoch. If the loss became NaN or infinite, return {}.

    Args:
        flags: flags of ``timm train``.

    Raises:
        KeyboardInterrupt: a signal stopped the run.
        TrainError: the run cannot start.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(**{"checkpoint_hist": 1, **flags, "output": folder})
        config = config if config.early_stop else config.replace(val_interval=config.epochs)
        try:
            row = Trainer(config, quiet=True).fit().history[-1]
        except NonFiniteLossError:
            return {}
        except Interrupted as error:
            raise KeyboardInterrupt from error
    return {key.removeprefix("eval_"): float(value) for key, value in row.items() if key.startswith("eval_")}


def say(line: str) -> None:
    """Print a message of a study."""
    print(line, file=sys.stderr, flush=True)


def versions() -> dict[str, str | None]:
    """Return the versions of the packages on which results depend."""
    return {package: installed_version(package) for package in ("topk-registry", "timm", "torch")}


def heading(name: str, protocol: str | None) -> dict[str, Any]:
    """Return the first entries of the results of a study on pictures: its name, its protocol, and its command."""
    command = shlex.join(["topk-registry", "study", name, "--data-dir", "DIR"])
    return {"study": name, "protocol": (protocol or "").splitlines(), "command": command}


class Runs:
    """Storage of the metrics of runs. A run whose flags and data are already in the file is not trained again.

    Args:
        path: file with one JSON object per line. If the file does not exist, the first run creates it.
        train: function that trains one run and returns its metrics.
        said: function that is called with a message after each new run.
        jobs: number of runs that are trained at the same time, each in a separate process.
        data: text that identifies the images, from :func:`fingerprint`. Runs with another text are trained again.
    """

    def __init__(
        self,
        path: Path,
        train: Callable[[Flags], Measured] = train,
        said: Callable[[str], object] = lambda line: None,
        jobs: int = 1,
        data: str = "",
    ) -> None:
        self.path, self.train, self.said, self.jobs, self.data = path, train, said, jobs, data
        self.done: dict[str, Measured] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                try:
                    row = json.loads(line)
                except ValueError:  # a line that a killed process did not finish
                    continue
                if row.get("data", "") == data:
                    self.done[_key(row["flags"])] = row["measured"]

    def __call__(self, flags: Flags) -> Measured:
        return self.all([flags])[0]

    def missing(self, runs: Sequence[Flags]) -> list[Flags]:
        """Return the runs whose metrics are not stored yet, without duplicates."""
        return list({_key(flags): flags for flags in runs if _key(flags) not in self.done}.values())

    def all(self, runs: Sequence[Flags]) -> list[Measured]:
        """Train the runs whose metrics are not stored yet. Return the metrics of all ``runs``, in the same order."""
        missing, start = self.missing(runs), time.monotonic()
        for i, (flags, measured) in enumerate(self._trained(missing), 1):
            self._keep(flags, measured)
            left = (time.monotonic() - start) / i * (len(missing) - i) / 60
            metric = str(flags.get("eval_metric", "top1"))
            found = f"{metric} {measured[metric]:.2f}" if metric in measured else "" if measured else "diverged"
            kind = {"validation": "trial", "test": "result"}.get(flags.get("val_split", ""), "run")
            self.said(f"{kind} {i} of {len(missing)}, {left:.0f} min left: {describe(flags)} {found}".rstrip())
        return [self.done[_key(flags)] for flags in runs]

    def _trained(self, runs: Sequence[Flags]) -> Iterator[tuple[Flags, Measured]]:
        if self.jobs == 1 or len(runs) < 2:
            yield from ((flags, self.train(flags)) for flags in runs)
            return
        from joblib import Parallel, delayed

        pool = Parallel(n_jobs=self.jobs, return_as="generator_unordered", pre_dispatch="n_jobs")
        found: Any = pool(delayed(_with_flags)(self.train, flags) for flags in runs)
        yield from found

    def _keep(self, flags: Flags, measured: Measured) -> None:
        self.done[_key(flags)] = measured
        whole = not self.path.exists() or self.path.read_text().endswith("\n")
        with self.path.open("a") as file:
            row = {"flags": flags, "measured": measured} | ({"data": self.data} if self.data else {})
            file.write(("" if whole else "\n") + json.dumps(row) + "\n")


def fingerprint(folder: str | Path) -> str:
    """Return a hash of the paths, sizes and modification times of all files in a folder."""
    inside = (Path(place, name) for place, _, names in os.walk(folder, followlinks=True) for name in names)
    files = sorted(path for path in inside if path.is_file())
    found = [(str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


def _with_flags(train: Callable[[Flags], Measured], flags: Flags) -> tuple[Flags, Measured]:
    return flags, train(flags)


def _key(flags: Flags) -> str:
    return json.dumps(flags, sort_keys=True)


def describe(flags: Flags) -> str:
    """Return the loss, the options of the loss, the learning rate and the seed of a run as text."""
    return " ".join([flags["loss"], *pairs(flags["loss_opt"]), f"lr={flags['lr']:g}", f"seed={flags['seed']}"])


def pairs(options: Mapping[str, Any]) -> list[str]:
    return [f"{name}={value}" for name, value in options.items()]


class Cell(NamedTuple):
    """One loss under one condition of the study, the flags that all its runs share, and the flags of each trial."""

    condition: str
    contestant: Contestant
    shared: Flags
    trials: list[dict[str, Any]]

    def tuning(self) -> list[Flags]:
        return [{**self.shared, **trial, "seed": TUNING_SEED, "val_split": "validation"} for trial in self.trials]

    def results(self, chosen: int | None, seeds: Sequence[int]) -> list[Flags]:
        """Return the flags of the runs for the results, one run per seed. ``chosen`` is the index of a trial.

        The runs have the flags of this trial. If ``chosen`` is None, because all trials diverged, return an empty list.
        """
        trial = {} if chosen is None else self.trials[chosen]
        return [{**self.shared, **trial, "seed": seed, "val_split": "test"} for seed in seeds if trial]


def cells(study: Study, base: Flags) -> list[Cell]:
    found = []
    for condition, options in study.conditions.items():
        shared = {**base, "dataset_opt": {**base.get("dataset_opt", {}), **options}}
        found += [Cell(condition, each, shared, each.trials(study.trials, study.rates)) for each in study.contestants]
    return found


def run(study: Study, base: Flags, seeds: Sequence[int], runs: Runs) -> list[dict[str, Any]]:
    """Run a study: train all trials, select the best trial of each loss, and train this trial with several seeds.

    Args:
        study: the study.
        base: flags that all runs share, for the data, the network and the schedule.
        seeds: seeds of the results.
        runs: storage of the runs.

    Returns:
        One row per condition and loss. ``tuning`` has the flags of each trial, and the value of the metric that selects
        a trial. ``chosen`` has the flags of the selected trial. For each metric of the study, the row has the value for
        each seed and the mean. If a run diverged, the mean is None. From the second loss of a condition on, the row
        also has the mean difference from the first loss over the same seeds, and the half-width of the 95 % interval.
    """
    table = cells(study, base)
    sign = -1 if study.metric in DECREASING else 1
    tuned = iter(runs.all([flags for cell in table for flags in cell.tuning()]))
    values = [[next(tuned).get(study.metric) for _ in cell.trials] for cell in table]
    chosen = [_best([sign * value if value is not None else None for value in each]) for each in values]
    runs.all([flags for cell, best in zip(table, chosen, strict=True) for flags in cell.results(best, seeds)])
    rows: list[dict[str, Any]] = []
    first: list[Measured] = []
    for cell, value, best in zip(table, values, chosen, strict=True):
        measured = runs.all(cell.results(best, seeds))
        first = measured if cell.contestant is study.contestants[0] else first
        row: dict[str, Any] = {"condition": cell.condition, "loss": cell.contestant.text}
        row["tuning"] = [{**trial, study.metric: one} for trial, one in zip(cell.trials, value, strict=True)]
        row["chosen"] = None if best is None else cell.trials[best]
        rows.append(row | {metric: _summary(metric, measured, first) for metric in study.metrics})
    return rows


def _best(values: Sequence[float | None]) -> int | None:
    # the index of the largest value; a run that diverged has the value None
    return max((i for i, value in enumerate(values) if value is not None), key=lambda i: values[i] or 0.0, default=None)


def _summary(metric: str, measured: Sequence[Measured], first: Sequence[Measured]) -> dict[str, Any]:
    values, others = ([one[metric] for one in each if metric in one] for each in (measured, first))
    if not values or len(values) < len(measured):
        return {"mean": None, "values": values}
    summary: dict[str, Any] = {"mean": fmean(values), "values": values}
    if measured is not first and len(others) == len(values):
        summary |= paired(values, others)
    return summary


def paired(values: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """Return the mean difference ``values - others`` of pairs, and the half-width of the 95 % interval of this mean.

    The interval is from Student's t distribution. For only one pair, there is no half-width.

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
    # the 97.5 % quantile of Student's t distribution: a table, then a series around the normal quantile
    small = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
    if degrees <= len(small):
        return small[degrees - 1]
    z = NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
