"""One case: build every contestant, warm it up, measure its memory, then time all of them in rounds."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from topk_studies.timing.contest import Case, Contestant, UnavailableError
from topk_studies.timing.memory import peak_bytes
from topk_studies.timing.rounds import OverLimitError, Sample, Spread, Step, interleave, step, time_limit

SET_UP = 60.0  # seconds a contestant may take to import and to compile what it needs


@dataclass(frozen=True)
class Row:
    """Times and memory of one contestant at one case; ``problem`` says why a figure is missing."""

    case: Case
    contestant: str
    forward: Spread | None
    backward: Spread | None
    both: Spread | None
    repeats: int
    peak_bytes: int | None
    problem: str


@dataclass
class Entry:
    """A contestant on its way through a case."""

    contestant: Contestant
    samples: list[Sample]
    step: Step | None = None
    peak_bytes: int | None = None
    problem: str = ""


def measure(
    case: Case,
    contestants: Sequence[Contestant],
    *,
    repeats: int,
    limit: float,
    memory: bool = True,
    tick: Callable[[str, int], None] = lambda name, count: None,
) -> tuple[list[Row], bool]:
    """Rows of all contestants, and whether the user interrupted; what was measured until then is kept.

    ``tick(name, count)`` is told of progress, ``1 + repeats`` counts a contestant. ``memory=False`` does without the
    meter, which needs more memory than what it looks at where a contestant takes very many steps.
    """
    entries = [Entry(contestant, []) for contestant in contestants]
    interrupted = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # old peers still run
        try:
            for entry in entries:
                _prepare(entry, case, limit, memory)
                tick(entry.contestant.name, 1 if entry.step else 1 + repeats)
            interleave(
                {entry.contestant.name: entry.step for entry in entries if entry.step},
                {entry.contestant.name: entry.samples for entry in entries},
                repeats=repeats,
                limit=limit,
                tick=lambda name: tick(name, 1),
            )
        except KeyboardInterrupt:
            interrupted = True
    return [_row(entry, case) for entry in entries], interrupted


def _prepare(entry: Entry, case: Case, limit: float, memory: bool) -> None:
    """Two passes to warm up, the second in view of the memory meter if that is wanted."""
    try:
        with time_limit(SET_UP + limit):  # cut short while it imports or compiles, it would be broken for good
            caches = "as they are" if "cold" not in case.options else "cold" if case.options["cold"] else "hot"
            graph = bool(case.options.get("graph"))
            run = step(entry.contestant.build(case), *case.inputs(), caches=caches, graph=graph)
            run()
        with time_limit(4 * limit):  # the meter slows a contestant of many small steps down
            if memory and not graph:  # a graph has its memory already
                entry.peak_bytes = peak_bytes(run, case.device)
            else:
                run()
        entry.step = run
    except (UnavailableError, OverLimitError) as error:
        entry.problem = str(error)
    except Exception as error:  # a contestant may fail in any way, and the others are still to be measured
        entry.problem = f"{type(error).__name__}: {error}".strip().splitlines()[0]


def _row(entry: Entry, case: Case) -> Row:
    times = {"forward": None, "backward": None, "both": None}
    if entry.samples:
        forward, backward = map(list, zip(*entry.samples, strict=True))
        both = [sum(sample) for sample in entry.samples]
        times = {"forward": Spread.of(forward), "backward": Spread.of(backward), "both": Spread.of(both)}
    problem = entry.problem or ("" if entry.samples else "interrupted")
    return Row(
        case, entry.contestant.name, **times, repeats=len(entry.samples), peak_bytes=entry.peak_bytes, problem=problem
    )
