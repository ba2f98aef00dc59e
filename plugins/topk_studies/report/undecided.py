"""What the open claims of a summary would take: the seeds at which the spread seen so far would decide them.

A text that holds ``<!-- open -->`` and ``<!-- /open -->`` has the table written between them, with its claims, by
``python -m topk_studies.report.account``.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from topk_studies.engine.statistics import EFFECT, LOOKS, share_of_alpha, t_quantile

BLOCK = re.compile(r"(?<=<!-- open -->\n).*?(?=<!-- /open -->)", re.DOTALL)
GAP = re.compile(r"^(?P<of>.*): (?P<mean>[+-][\d.]+) ± (?P<half>[\d.]+) points \((?P<seeds>\d+) seeds?\b")
COLUMNS = ("what is compared", "mean", "spread", "seeds so far", "seeds that would decide", "minutes of runs")
ALONE = ("multi-crop",)  # studies that compare within a run: elsewhere a seed takes two


@dataclass(frozen=True)
class Undecided:
    """An open claim: what was compared, and what it would take.

    Args:
        study: the study.
        of: what was subtracted from what.
        mean: of the differences so far, in points.
        spread: their standard deviation over seeds.
        seeds: their number.
        needed: the seeds that would decide it, if mean and spread stayed; None for more than the studies go to.
        minutes: of the further runs.
    """

    study: str
    of: str
    mean: float
    spread: float
    seeds: int
    needed: int | None
    minutes: float


def table(summaries: Sequence[Mapping[str, Any]]) -> str:
    """Every open claim in Markdown."""
    rows = [COLUMNS, ("---",) * len(COLUMNS)]
    rows += [
        (
            f"{each.study}, {each.of}",
            f"{each.mean:+.2f}",
            f"{each.spread:.1f}",
            f"{each.seeds}",
            f"{each.needed}" if each.needed else f"more than {LOOKS[-1]}",
            f"{each.minutes:.0f}" if each.needed else "",
        )
        for each in undecided(summaries)
    ]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def undecided(summaries: Sequence[Mapping[str, Any]]) -> Iterator[Undecided]:
    """The open claims that are differences with an interval, in the order of the summaries."""
    for summary in summaries:
        gaps = [(note, match) for note in summary["notes"] if (match := GAP.match(note["evidence"]))]
        for note, match in gaps:
            if note["verdict"] == "open":
                yield _undecided(summary, match, len(gaps))


def needed(mean: float, spread: float, seeds: int, claims: int, effect: float = EFFECT) -> int | None:
    """The first look after ``seeds`` at which a mean of this spread over seeds is decided; None where none is."""
    for look in LOOKS:
        half = factor(look, claims) * spread
        if look > seeds and (abs(mean) > half or abs(mean) + half < effect):
            return look
    return None


def factor(seeds: int, claims: int) -> float:
    """Half widths of the corrected interval in standard deviations over seeds."""
    return t_quantile(1 - share_of_alpha(seeds, claims) / 2, seeds - 1) / math.sqrt(seeds)


def _undecided(summary: Mapping[str, Any], match: re.Match[str], claims: int) -> Undecided:
    mean, seeds = float(match["mean"]), int(match["seeds"])
    spread = float(match["half"]) / factor(seeds, claims)
    more = needed(mean, spread, seeds, claims)
    a_seed = (1 if summary["study"] in ALONE else 2) * summary["seconds"] / summary["runs"]
    return Undecided(summary["study"], match["of"], mean, spread, seeds, more, ((more or seeds) - seeds) * a_seed / 60)
