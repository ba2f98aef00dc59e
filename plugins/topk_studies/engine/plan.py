"""How long a study's training runs would take here: they are counted, and a few steps of each kind are timed.

The runs of a later stage depend on the results of an earlier one, their number does not: results are made up until
nothing more is wanted. A sample that is evaluated counts as a third of one that is trained on, which is the share of
the forward pass.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from topk_studies.engine import training
from topk_studies.engine.experiment import TrainingStudy
from topk_studies.engine.store import canonical, unique
from topk_studies.engine.study import Configuration, Options, Record, Study
from topk_studies.old_trainer import TrainConfig
from topk_studies.old_trainer.setup.datasets import open_data, open_split
from topk_studies.report.cells import duration
from topk_studies.report.display import metric_name

SAME = (
    "seed",
    "lr",
    "weight_decay",
    "label_noise",
    "label_noise_kind",
    "val_fold",
)  # flags that change no run's length
WARM, TIMED = 3, 8  # steps
EVALUATED = 1 / 3  # of a training step


@dataclass(frozen=True)
class Kind:
    """Runs that take equally long: one of them, their number, and the seconds of a step and of a run."""

    configuration: Configuration
    runs: int
    step: float
    seconds: float


def kinds(study: Study, options: Options, planned: set[str]) -> list[Kind]:
    """Return the training runs of a study by kind, timed on this machine; none for a study that trains nothing.

    Args:
        study: the study.
        options: as the command line gives them.
        planned: runs of other studies, which are done once; those of this one are added.

    Raises:
        ConfigurationError: a run cannot begin: its data is not there.
    """
    if not isinstance(study, TrainingStudy):
        return []
    alike: dict[str, list[Configuration]] = {}
    for configuration in all_runs(study, options):
        if canonical(configuration) not in planned:
            planned.add(canonical(configuration))
            alike.setdefault(canonical(_kind(configuration)), []).append(configuration)
    return [Kind(runs[0], len(runs), *_timed(runs[0])) for runs in alike.values()]


def all_runs(study: TrainingStudy, options: Options) -> list[Configuration]:
    """The runs of all stages; with seeds that are added, as many as there are where no claim stays open."""
    wanted: list[Configuration] = []
    while True:
        known = [_made_up(study, configuration) for configuration in wanted]
        more = unique(study.configurations(options, known))
        if len(more) == len(wanted):
            return wanted
        wanted = more


def words(name: str, all_kinds: Sequence[Kind], jobs: int) -> str:
    """The plan of a study as text."""
    if not all_kinds:
        return f"{name}: no training that is not planned yet"
    first, seconds = all_kinds[0].configuration["flags"], seconds_of(all_kinds)
    data = first.get("dataset") or first.get("data_dir")
    runs = _counted(sum(kind.runs for kind in all_kinds), "run")
    metric = metric_name(first["eval_metric"])
    lines = [f"{name}: {runs} on {data}, {first['model']}, by {metric}; expected {duration(seconds)}"]
    lines[0] += f", {duration(seconds / jobs)} with {jobs} side by side" if jobs > 1 else ""
    for kind in all_kinds:
        flags = kind.configuration["flags"]
        told = [flags["loss"], *(f"{option}={value}" for option, value in flags.get("loss_opt", {}).items())]
        told += [f"subset={flags['subset']:g}"] if "subset" in flags else []
        lines.append(
            f"  {' '.join(told)}: {_counted(kind.runs, 'run')} of {_counted(flags['epochs'], 'epoch')}, "
            f"{1000 * kind.step:.1f} ms a step, {duration(kind.seconds)} a run"
        )
    return "\n".join(lines)


def seconds_of(all_kinds: Sequence[Kind]) -> float:
    """Return the seconds of all runs, one after another."""
    return sum(kind.runs * kind.seconds for kind in all_kinds)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _kind(configuration: Configuration) -> Configuration:
    flags = {name: value for name, value in configuration["flags"].items() if name not in SAME}
    return {**configuration, "flags": flags}


def _made_up(study: TrainingStudy, configuration: Configuration) -> Record:
    """A record with every metric at 0."""
    metrics = {study.METRIC, *study.METRICS, configuration["flags"]["eval_metric"]}
    row = {name: 0.0 for metric in metrics for name in (metric, f"test_{metric}")}
    result = {"history": [{"epoch": 1.0, "nonzero": 0.0, **row}], "ways": _Zeros(), "temperature": 1.0}
    return Record(study.RUNS, study.VERSION, configuration, result, 0.0, "", {})


class _Zeros(dict[str, Any]):
    """A table of numbers in which every entry is 0."""

    def __missing__(self, key: str) -> Any:
        return _Zeros() if not key.startswith("top") else 0.0


class _EnoughError(Exception):
    """Enough steps were timed."""


def _timed(configuration: Configuration) -> tuple[float, float]:
    """Seconds of a step, and of the whole run."""
    told = [(time.perf_counter(), 0.0)]

    def progress(share: float, words: str) -> None:
        told.append((time.perf_counter(), share))
        if len(told) > 1 + WARM + TIMED:
            raise _EnoughError

    with TemporaryDirectory(prefix="topk-plan-") as folder, suppress(_EnoughError):
        training.run(configuration, Path(folder), progress)
    first = min(1 + WARM, len(told) - 2)  # of a run of few steps the first ones count, too
    each = median(later - sooner for (sooner, _), (later, _) in pairwise(told[first:]))
    steps = 1 / told[1][1]
    return each, each * (steps + EVALUATED * _evaluated(configuration))


def _evaluated(configuration: Configuration) -> float:
    """The evaluations of a run, in batches of its training."""
    config = TrainConfig.from_dict(configuration["flags"])
    test = open_split(config, configuration["test_split"], training=False)
    samples = len(test) + len(open_data(config).validation)
    return samples / config.batch_size * -(-config.epochs // config.val_interval)
