"""The same tuning budget for every loss: a grid on one seed, its best trial on all seeds.

A trial is judged by its best epoch on the validation split, the split that also picks the epoch of every run (early
stopping, cross-entropy's included); the test split is reported. With a fixed number of seeds, the first seed's runs are
both trial and result, so that no run is done twice.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from topk_studies.engine.settings import Trial, base_flags, reported_split, trials
from topk_studies.engine.statistics import estimate
from topk_studies.engine.store import canonical
from topk_studies.engine.study import Configuration, Estimate, Options, Record
from topk_studies.engine.training import configure

TUNING_SEED = 1000  # where seeds are added until claims are decided, trials run on this one and no result does
TUNED = ("lr", "loss_opt", "normalize_classifier")
SMALLER = ("set_mean_size",)  # metrics that are better the smaller they are


def run_of(options: Options, **flags: Any) -> Configuration:
    """One training run of the options' budget."""
    return configure(options, base_flags(options), reported_split(options), **flags)


def tuned_runs(
    options: Options,
    known: Sequence[Record],
    loss: str,
    seeds: Sequence[int],
    flags: Mapping[str, Any] | None = None,
    *,
    metric: str = "top5",
    grid: Sequence[Trial] | None = None,
    tuning_seed: int | None = None,
) -> list[Configuration]:
    """A loss's runs under some flags: the grid on one seed and, once that is known, its best trial on the others.

    The grid's seed is the first of ``seeds``, unless ``tuning_seed`` names one that no result is reported of.
    """
    chosen = grid if grid is not None else trials(options, loss)
    tuning = seeds[0] if tuning_seed is None else tuning_seed
    first = [run_of(options, loss=loss, seed=tuning, **merge(flags or {}, trial)) for trial in chosen]
    finished = {canonical(record.configuration): record for record in known}
    records = [finished.get(canonical(configuration)) for configuration in first]
    if any(record is None for record in records):
        return first
    best = best_of([record for record in records if record is not None and not record.error], metric)
    if best is None:
        return first
    again = [with_seed(best.configuration, seed) for seed in seeds if seed != tuning]
    return first + again


def merge(flags: Mapping[str, Any], trial: Trial) -> dict[str, Any]:
    """Flags under a trial's, options of the loss put together."""
    options = {**flags.get("loss_opt", {}), **trial.get("loss_opt", {})}
    return {**flags, **trial, **({"loss_opt": options} if options else {})}


def with_seed(configuration: Configuration, seed: int) -> Configuration:
    return {**configuration, "flags": {**configuration["flags"], "seed": seed}}


def best_of(records: Sequence[Record], metric: str) -> Record | None:
    """The record with the best validation epoch; the first of equals."""
    if len(records) == 1:
        return records[0]
    return max(records, key=lambda record: better(score(record, metric, "validation"), metric), default=None)


def better(value: float, metric: str) -> float:
    """The value of a metric, with a sign that makes the larger the better one."""
    return -value if metric in SMALLER else value


def score(record: Record, metric: str, split: str = "test", *, by: str = "") -> float:
    """A metric on a split, at the epoch that is best on the validation split by ``by`` (by default the metric)."""
    row = best_epoch(record, by or metric)
    return row[metric if split == "validation" else f"test_{metric}"]


def best_epoch(record: Record, metric: str) -> dict[str, float]:
    return max((row for row in record.result["history"] if metric in row), key=lambda row: better(row[metric], metric))


def metric_of(records: Sequence[Record]) -> str:
    """The metric that the runs were asked to be best in."""
    flags = records[0].configuration.get("flags", {}) if records else {}
    return flags.get("eval_metric", "top1").replace("-", "_")


@dataclass(frozen=True)
class Choice:
    """The trial that a loss won with under some flags, its runs by seed, and all trials on the first seed."""

    loss: str
    flags: dict[str, Any]
    trial: dict[str, Any]
    runs: dict[int, Record]
    trials: tuple[Record, ...]

    def scores(self, metric: str, *, by: str = "") -> dict[int, float]:
        """The test split's metric of each seed."""
        return {seed: score(record, metric, by=by) for seed, record in sorted(self.runs.items())}

    def estimate(self, metric: str, *, by: str = "") -> Estimate | None:
        return estimate(list(self.scores(metric, by=by).values()))


def groups(all_choices: Iterable[Choice], key: Callable[[Choice], Any]) -> dict[Any, list[Choice]]:
    """Choices that have a key in common, in the order in which the keys first come."""
    together: dict[Any, list[Choice]] = {}
    for choice in all_choices:
        together.setdefault(key(choice), []).append(choice)
    return together


def label_noise_of(choice: Choice) -> float:
    return choice.flags.get("label_noise", 0.0)


def choices(records: Iterable[Record], *, metric: str = "top5", tuned: Sequence[str] = TUNED) -> list[Choice]:
    """The winners among the records: of runs that differ in tuned flags alone, in the order of the records."""
    alike: dict[str, list[Record]] = {}
    for record in records:
        alike.setdefault(canonical(_without(record, (*tuned, "seed"))), []).append(record)
    return [_choice(group, metric, tuned) for group in alike.values()]


def _choice(records: Sequence[Record], metric: str, tuned: Sequence[str]) -> Choice:
    seeds = {seed_of(record) for record in records}
    first = TUNING_SEED if TUNING_SEED in seeds else min(seeds)
    tried = tuple(record for record in records if seed_of(record) == first)
    best = best_of(tried, metric)
    assert best is not None
    same = canonical(_without(best, ("seed",)))
    runs = {seed_of(record): record for record in records if canonical(_without(record, ("seed",))) == same}
    if first == TUNING_SEED and len(runs) > 1:
        del runs[first]  # it was chosen for its score
    flags = best.configuration["flags"]
    return Choice(
        loss=flags["loss"],
        flags={name: value for name, value in flags.items() if name not in (*tuned, "seed", "loss")},
        trial={name: flags[name] for name in tuned if name in flags},
        runs=runs,
        trials=tried,
    )


def _without(record: Record, names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in record.configuration["flags"].items() if name not in names}


def seed_of(record: Record) -> int:
    return record.configuration["flags"]["seed"]
