"""The protocol of a study: its options, its records and its findings.

A study's module offers the names of :class:`Study`. Everything between them is plain: a configuration and a result are
JSON, a report is a function of records alone.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

Configuration = dict[str, Any]
Progress = Callable[[float, str], None]  # (share done in [0, 1], a few words)

BUDGETS = ("small", "standard", "paper")


class ConfigurationError(Exception):
    """A run cannot be done as it is asked for; its message is for the user, without a traceback."""


@dataclass(frozen=True)
class Options:
    """Options of a study, from the command line.

    Args:
        losses: names of registered losses; None for the paper's.
        budget: ``"small"``: the built-in data on a laptop; ``"standard"``: the same with crops, more epochs and more
            settings, a night; ``"paper"``: the papers' data, networks and epochs.
        seeds: None for the study's own number of them.
        max_seeds: the most seeds to add while claims are open; None for a fixed number.
        flags: flags of ``timm train``, by their Python names, that hold in every training run of the study.
        test_split: the split that results are reported on; None for the data's own.
        device: as in ``timm train``.
        rates: the lowest and the highest learning rate of the comparison's trials; None for the optimizer's usual ones.
        folds: parts of the training data that the comparison judges each trial on, in turn.
    """

    losses: tuple[str, ...] | None = None
    budget: str = "small"
    seeds: tuple[int, ...] | None = None
    max_seeds: int | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)
    test_split: str | None = None
    device: str = "cpu"
    rates: tuple[float, float] | None = None
    folds: int = 1


@dataclass(frozen=True)
class Record:
    """One run: what was asked, what came out, how long it took, when, and with which versions.

    ``error`` is set, and ``result`` empty, where the run failed.
    """

    kind: str
    version: int
    configuration: Configuration
    result: dict[str, Any]
    seconds: float
    when: str
    versions: dict[str, str]
    error: str = ""


@dataclass(frozen=True)
class Estimate:
    """A mean over ``count`` runs with the half width of its 95 % confidence interval (NaN for a single run)."""

    mean: float
    half_width: float
    count: int

    @property
    def low(self) -> float:
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        return self.mean + self.half_width

    def __str__(self) -> str:
        return f"{self.mean:.2f}" + ("" if math.isnan(self.half_width) else f" ± {self.half_width:.2f}")


@dataclass(frozen=True)
class Median:
    """The median of ``count`` measurements between their quartiles."""

    middle: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return _three(self.middle) + ("" if self.count < 2 else f" ({_three(self.low)} to {_three(self.high)})")


def _three(number: float) -> str:
    """Three significant digits, all of those before the point."""
    return f"{number:.0f}" if 999.5 <= abs(number) < 1e7 else f"{number:.3g}"


Value = str | int | float | Estimate | Median | None


@dataclass(frozen=True)
class Table:
    """Rows under columns. ``paper`` names the columns whose numbers are a paper's; None is an empty cell.

    The numbers of the columns ``compared`` compete, within each column or (``along="row"``) within each row; the page
    marks the ``best`` of them (``"max"`` or ``"min"``) where its interval is apart from all others.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]
    note: str = ""
    paper: tuple[str, ...] = ()
    compared: tuple[str, ...] = ()
    best: str = "max"
    along: str = "column"


@dataclass(frozen=True)
class Figure:
    """A picture: ``draw`` gets an empty ``matplotlib.figure.Figure`` of ``size`` inches and fills it.

    ``alt`` is what it shows, in words, for those who do not see it; without it, title and caption have to do.
    """

    title: str
    caption: str
    draw: Callable[[Any], None]
    size: tuple[float, float] = (9.0, 4.0)
    alt: str = ""


@dataclass(frozen=True)
class Note:
    """A claim of a paper beside what these runs say of it, computed from numbers.

    ``verdict`` is one of ``"agrees"``, ``"differs"``, ``"same"`` (no difference that matters), ``"open"`` (more seeds
    may tell) and ``"none"`` (more seeds cannot tell: the evidence says why, and what could). ``beyond`` is set where
    the claim is not the paper's; ``paper`` is its own number in words, where it could be checked.
    """

    claim: str
    verdict: str
    evidence: str
    beyond: bool = False
    paper: str = ""

    @property
    def told(self) -> str:
        """The evidence, and the paper's number beside it."""
        return f"{self.evidence}; the paper: {self.paper}" if self.paper else self.evidence


@dataclass(frozen=True)
class Findings:
    """Findings of a study. ``protocol`` says in sentences how they were made; ``commands`` are (purpose, command)."""

    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()
    notes: tuple[Note, ...] = ()
    protocol: str = ""
    commands: tuple[tuple[str, str], ...] = ()


class Study(Protocol):
    """The names that a study's module offers.

    ``RUNS`` names the folder of its runs in the cache: studies whose runs are of one kind share them. ``VERSION`` is
    part of a run's key: raise it when what a run does changes. ``ALONE`` runs are never run side by side (timings).
    """

    TITLE: str
    QUESTION: str
    REFERENCE: str
    RUNS: str
    VERSION: int
    ALONE: bool
    __name__: str

    def configurations(self, options: Options, known: Sequence[Record]) -> list[Configuration]:
        """The runs that are wanted, one plain dict each.

        Asked again, with the records of those wanted so far in ``known`` (failed ones too), until nothing new is
        wanted: a study may choose the next runs by the results of the first.
        """
        ...

    def run(self, configuration: Configuration, work: Path, progress: Progress) -> dict[str, Any]:
        """One run, as JSON-able numbers. ``work`` is a folder of its own, which outlives an interrupt."""
        ...

    def report(self, records: Sequence[Record]) -> Findings:
        """Tables, figures and notes; a function of the records of finished runs alone."""
        ...


@dataclass(frozen=True)
class Section:
    """A study in the report: what it asks, what was found, and from which runs."""

    name: str
    title: str
    question: str
    reference: str
    findings: Findings
    records: tuple[Record, ...]
    failed: tuple[Record, ...] = ()
    command: str = ""
