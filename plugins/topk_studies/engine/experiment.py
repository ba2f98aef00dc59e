"""Studies whose runs are training runs: what they share, so that a study's file says only what is its own."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from topk_studies.engine import training
from topk_studies.engine.settings import RATES, Trial
from topk_studies.engine.statistics import LOOKS, Claim, paired, settle
from topk_studies.engine.store import canonical, unique
from topk_studies.engine.study import Configuration, Figure, Findings, Note, Options, Progress, Record, Table
from topk_studies.engine.tuning import TUNED, TUNING_SEED, Choice, choices, groups, tuned_runs, with_seed
from topk_studies.engine.variants import variant_runs, variants
from topk_studies.report import display

Key = Callable[[Choice], Any]
Name = Callable[[Choice], str]


class TrainingStudy:
    """A study of training runs.

    Subclasses set the attributes and write :meth:`wanted` and :meth:`claims`; an instance named ``STUDY`` is what the
    catalogue finds.
    """

    NAME: str
    TITLE: str
    QUESTION: str
    REFERENCE: str
    RUNS, VERSION, ALONE = training.RUNS, training.VERSION, False
    LOSSES: tuple[str, ...] = ()
    SEEDS: tuple[int, ...] = (0,)
    METRIC = "top5"  # chooses trials and epochs
    METRICS: tuple[str, ...] = ("top5", "top1")  # reported
    KEY = ""  # the name of what the rows of the tables differ in
    PROTOCOL = ""  # a sentence of the study's own

    @property
    def __name__(self) -> str:
        return type(self).__module__

    def wanted(self, options: Options, known: Sequence[Record], seeds: Sequence[int]) -> list[Configuration]:
        """The runs on these seeds."""
        raise NotImplementedError

    def choices(self, records: Sequence[Record]) -> list[Choice]:
        """The settings that were compared, with their runs."""
        raise NotImplementedError

    def foreseen(self, options: Options) -> Sequence[str]:
        """Reasons, known before any run, why the runs may decide nothing."""
        return ()

    def claims(self, all_choices: Sequence[Choice]) -> Sequence[Claim | Note]:
        """The papers' claims beside the runs."""
        return ()

    def settle(self, claims: Sequence[Claim | Note]) -> tuple[Note, ...]:
        return settle(claims)

    def tables(self, all_choices: Sequence[Choice]) -> tuple[Table, ...]:
        return tuple(self.grid_table(f"Accuracy by {self.KEY}", all_choices, metric) for metric in self.METRICS)

    def figures(self, all_choices: Sequence[Choice]) -> tuple[Figure, ...]:
        return ()

    def key(self, choice: Choice) -> Any:
        """The setting that differs between rows of the tables."""
        raise NotImplementedError

    def name(self, choice: Choice) -> str:
        """The setting that differs between columns of the tables."""
        return choice.loss

    # the contract of a study

    def configurations(self, options: Options, known: Sequence[Record]) -> list[Configuration]:
        """The runs of the study's seeds; with ``max_seeds``, more seeds for the settings of open claims."""
        if options.max_seeds is None:
            return self.wanted(options, known, options.seeds or self.SEEDS)
        at_once = self.wanted(options, known, range(min(LOOKS[0], options.max_seeds)))
        return unique([*at_once, *self._more_seeds(options.max_seeds, known)])

    def run(self, configuration: Configuration, work: Path, progress: Progress) -> dict[str, Any]:
        return training.run(configuration, work, progress)

    def report(self, records: Sequence[Record]) -> Findings:
        all_choices = self.choices(records)
        quality = display.quality_table(self.KEY, self.key, all_choices, self.METRIC, name=self.name)
        return Findings(
            tables=(*self.tables(all_choices), *filter(None, [quality])),
            figures=self.figures(all_choices),
            notes=self.settle(self.claims(all_choices)),
            protocol=" ".join(filter(None, [display.protocol(all_choices, self.METRIC), self.PROTOCOL])),
            commands=display.commands(self.NAME, records),
        )

    def _more_seeds(self, limit: int, known: Sequence[Record]) -> Iterator[Configuration]:
        """Runs of further seeds, one look at a time, where the seeds so far leave a claim open."""
        finished = [record for record in known if not record.error]
        tried = {canonical(record.configuration) for record in known}
        claims = self.claims(self.choices(finished))
        verdicts = [note.verdict for note in self.settle(claims)]
        for claim, verdict in zip(claims, verdicts, strict=True):
            if not isinstance(claim, Claim):
                continue
            have = len(claim.differences)
            for choice in claim.choices if have >= min(LOOKS[0], limit) else ():
                first = next(iter(choice.runs.values())).configuration
                again = [with_seed(first, seed) for seed in range(limit)]
                ahead = min((look for look in (*LOOKS, limit) if look > have), default=have)
                count = min(ahead, limit) if verdict == "open" else have
                yield from (each for i, each in enumerate(again) if i < count or canonical(each) in tried)

    # what subclasses build their reports from

    def grid_table(
        self,
        title: str,
        all_choices: Sequence[Choice],
        metric: str,
        *,
        paper: display.Paper | None = None,
        note: str = "",
    ) -> Table:
        reference = self.REFERENCE
        return display.grid_table(
            title, self.KEY, self.key, all_choices, metric, reference, name=self.name, paper=paper, note=note
        )

    def lines(self, title: str, all_choices: Sequence[Choice], metric: str = "", *, log: bool = False) -> Figure:
        return display.lines_figure(
            title, self.KEY, self.key, all_choices, metric or self.METRIC, log=log, name=self.name
        )

    def pair(
        self,
        text: str,
        all_choices: Sequence[Choice],
        better: str,
        worse: str,
        metric: str = "",
        where: str = "",
        paper: float | None = None,
    ) -> list[Claim]:
        """The claim that one setting beats another, by name; none where either is missing. ``paper`` is its figure."""
        place = {self.name(choice): choice for choice in all_choices}
        if better not in place or worse not in place:
            return []
        return [self.versus(text, place[better], place[worse], better, worse, metric, where, paper)]

    def versus(
        self,
        text: str,
        first: Choice,
        second: Choice,
        better: str,
        worse: str,
        metric: str = "",
        where: str = "",
        paper: float | None = None,
    ) -> Claim:
        """The claim that the first setting beats the second, which are told by these names."""
        metric = metric or self.METRIC
        words = f"{where + ', ' if where else ''}{display.metric_name(metric)} of {better} less {worse}"
        return Claim(text, paired(first.scores(metric), second.scores(metric)), words, (first, second), paper=paper)

    def by_key(self, all_choices: Sequence[Choice]) -> list[tuple[Any, list[Choice]]]:
        """The settings of each row."""
        return list(groups(all_choices, self.key).items())


@dataclass(frozen=True)
class Way:
    """A way to train, which a study compares with others.

    Args:
        loss: the loss.
        flags: what is fixed.
        trials: what tuning chooses from; None for the loss's usual ones.
    """

    loss: str = "ce"
    flags: Mapping[str, Any] = field(default_factory=dict)
    trials: Sequence[Trial] | None = tuple({"lr": lr} for lr in RATES)


class TunedStudy(TrainingStudy):
    """Losses against each other, each tuned by the same number of trials."""

    TUNED: tuple[str, ...] = TUNED

    def settings(self, options: Options) -> Sequence[Mapping[str, Any]]:
        """The flags of each row."""
        raise NotImplementedError

    def options_of(self, options: Options, flags: Mapping[str, Any]) -> Options:
        """The options under some flags."""
        return options

    def contestants(self, options: Options) -> Sequence[tuple[str, Mapping[str, Any]]]:
        """The losses, and the options of each that are not tuned."""
        return [(loss, {}) for loss in options.losses or self.LOSSES]

    def trials(self, options: Options, loss: str) -> Sequence[Trial] | None:
        """A loss's trials; None for the usual ones."""
        return None

    def ways(self, options: Options) -> Sequence[Way]:
        """What is compared in each row."""
        return [
            Way(loss, {"loss_opt": fixed} if fixed else {}, self.trials(options, loss))
            for loss, fixed in self.contestants(options)
        ]

    def wanted(self, options: Options, known: Sequence[Record], seeds: Sequence[int]) -> list[Configuration]:
        tuning = None if options.max_seeds is None else TUNING_SEED
        return [
            configuration
            for flags in self.settings(options)
            for way in self.ways(options)
            for configuration in tuned_runs(
                self.options_of(options, flags),
                known,
                way.loss,
                seeds,
                {**flags, **way.flags},
                metric=self.METRIC,
                grid=way.trials,
                tuning_seed=tuning,
            )
        ]

    def choices(self, records: Sequence[Record]) -> list[Choice]:
        return choices(records, metric=self.METRIC, tuned=self.TUNED)

    def tables(self, all_choices: Sequence[Choice]) -> tuple[Table, ...]:
        return (*super().tables(all_choices), *self.tuning_tables(all_choices))

    def tuning_tables(self, all_choices: Sequence[Choice]) -> tuple[Table, ...]:
        """Differences from cross-entropy, and what tuning chose."""
        return (
            display.differences_table(all_choices, self.KEY, self.key, self.METRICS, name=self.name),
            display.trials_table(all_choices, self.KEY, self.key, self.METRIC, name=self.name),
        )


class WaysStudy(TunedStudy):
    """Ways to train against each other on the same data: a way is a loss with flags, told by its name."""

    WAYS: Mapping[str, Way]
    PLAIN: str  # the way that the others are compared with in a table
    TOLD_BY: tuple[str, ...]  # flags that tell ways of the same loss apart
    TABLE: str  # the title of the table of all ways
    NOTE = ""  # below that table

    def ways(self, options: Options) -> Sequence[Way]:
        return [way for way in self.WAYS.values() if options.losses is None or way.loss in options.losses]

    def name(self, choice: Choice) -> str:
        """The way that a setting is; a loss's name where it is none of them."""
        asked = {flag: choice.flags.get(flag) for flag in self.TOLD_BY}
        for name, way in self.WAYS.items():
            if way.loss == choice.loss and asked == {flag: way.flags.get(flag) for flag in asked}:
                return name
        return choice.loss

    def tables(self, all_choices: Sequence[Choice]) -> tuple[Table, ...]:
        scores = display.list_table(
            self.TABLE, all_choices, self.METRICS, self.REFERENCE, name=self.name, note=self.NOTE
        )
        return (scores, *self.tuning_tables(all_choices))

    def tuning_tables(self, all_choices: Sequence[Choice]) -> tuple[Table, ...]:
        """Differences from the plain way, and what tuning chose."""
        return (
            display.differences_table(
                all_choices, self.KEY, self.key, self.METRICS, baseline=self.PLAIN, name=self.name
            ),
            display.trials_table(all_choices, self.KEY, self.key, self.METRIC, name=self.name),
        )


class VariantStudy(TrainingStudy):
    """Options of one loss: one setting of everything else, nothing tuned."""

    def points(self, options: Options) -> Sequence[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
        """(loss, its options, flags of the run) of each setting."""
        raise NotImplementedError

    def wanted(self, options: Options, known: Sequence[Record], seeds: Sequence[int]) -> list[Configuration]:
        return [
            configuration
            for loss, loss_options, flags in self.points(options)
            for configuration in variant_runs(options, loss, loss_options, seeds, flags)
        ]

    def choices(self, records: Sequence[Record]) -> list[Choice]:
        return variants(records)
