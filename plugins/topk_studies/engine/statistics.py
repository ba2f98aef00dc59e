"""Means over runs with their confidence, and what they say of claims.

Claims are judged by paired differences over seeds, with Student's t intervals that are corrected twice, by the union
bound. The study's error of 5 % is divided by the number of its claims, and the share of a claim is divided over the
looks at the results, in proportion to their seeds: seeds may be added up to each number in ``LOOKS`` and the claims
judged anew, and still the chance that any claim of the study is decided wrongly is at most 5 %, for normal differences.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

from scipy.special import stdtrit

from topk_studies.engine.study import Estimate, Note

ALPHA = 0.05  # the chance that any verdict of a study is wrong
LOOKS = (5, 8, 13, 21, 40)  # numbers of seeds at which claims are judged; fewer than the first decide nothing
POINTS = "points"
EFFECT = 1.0  # points of accuracy: the smallest difference that matters, unless a claim names another


def estimate(values: Sequence[float], level: float = 1 - ALPHA) -> Estimate | None:
    """Mean and confidence interval (Student's t) of runs that differ in their seed; None for no run.

    Two runs have no interval: Student's would be nine of their standard deviations to either side, and says nothing.
    """
    if not values:
        return None
    n = len(values)
    if n < 3:
        return Estimate(fmean(values), math.nan, n)
    return Estimate(fmean(values), t_quantile((1 + level) / 2, n - 1) * stdev(values) / math.sqrt(n), n)


def t_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t distribution."""
    return float(stdtrit(degrees, probability))


def paired(first: Mapping[int, float], second: Mapping[int, float]) -> dict[int, float]:
    """The first less the second, values by seed, where a seed has both."""
    return {seed: first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())}


def difference(first: Mapping[int, float], second: Mapping[int, float]) -> Estimate | None:
    """The mean of the paired differences with its interval; None where no seed has both."""
    return estimate(list(paired(first, second).values()))


@dataclass(frozen=True)
class Claim:
    """A paper's claim that ``differences``, points of accuracy by seed, are above 0.

    Args:
        text: the claim.
        differences: paired by seed.
        of: what was subtracted from what.
        choices: the settings that were compared; more seeds of them decide an open claim.
        effect: the smallest difference that matters.
        none: whether the claim is, instead, that there is no difference that matters.
        paper: the paper's own difference, in points, where it could be checked.
        unit: what is counted where it is not points of accuracy.
    """

    text: str
    differences: Mapping[int, float]
    of: str
    choices: tuple[Any, ...] = ()
    effect: float = EFFECT
    none: bool = False
    paper: float | None = None
    unit: str = POINTS


def settle(claims: Sequence[Claim | Note], *, count: int | None = None) -> tuple[Note, ...]:
    """Judge a study's claims together; a note that is settled already stays as it is.

    Args:
        claims: the claims.
        count: of claims that share the study's error; by default those that are given.
    """
    count = sum(isinstance(claim, Claim) for claim in claims) if count is None else count
    return tuple(_settled(claim, count) if isinstance(claim, Claim) else claim for claim in claims)


def _settled(claim: Claim, count: int) -> Note:
    values = list(claim.differences.values())
    gap = estimate(values, 1 - share_of_alpha(len(values), count))
    note = judge(claim.text, gap, claim.of, claim.effect, none=claim.none, unit=claim.unit)
    return note if claim.paper is None else replace(note, paper=f"{claim.paper:+.2f}")


def share_of_alpha(seeds: int, claims: int) -> float:
    """Return the chance of a wrong verdict that one claim may take at a look with this many seeds."""
    look = max((look for look in LOOKS if look <= seeds), default=LOOKS[0])
    return ALPHA / claims * look / sum(LOOKS)


def judge(
    claim: str, gap: Estimate | None, of: str, effect: float = EFFECT, *, none: bool = False, unit: str = POINTS
) -> Note:
    """Compare a paper's claim that a difference is above 0, or ``none`` that matters, with its interval.

    The runs agree, or differ, where the interval excludes 0; they show no difference that matters where it lies within
    plus and minus ``effect``; elsewhere, and with fewer seeds than the first of ``LOOKS``, they leave the claim open.
    """
    if gap is None:
        return Note(claim, "open", f"{of}: not measured")
    few = gap.count < LOOKS[0]  # corrected for all claims and looks, their interval would be wider than all accuracies
    small = -effect < gap.low and gap.high < effect
    verdict = "open" if few else _verdict(gap, effect, small, none)
    interval = "" if few else f" ± {gap.half_width:.2f}"
    seeds = f"{gap.count} seed{'s' if gap.count > 1 else ''}{f', of {LOOKS[0]} that a verdict needs' if few else ''}"
    words = f"; no difference larger than {effect:g}" if verdict == "same" or (none and verdict == "agrees") else ""
    return Note(claim, verdict, f"{of}: {gap.mean:+.2f}{interval} {unit} ({seeds}){words}")


def _verdict(gap: Estimate, effect: float, small: bool, none: bool) -> str:
    if none:
        return "agrees" if small else "differs" if gap.low > effect or gap.high < -effect else "open"
    return "agrees" if gap.low > 0 else "differs" if gap.high < 0 else "same" if small else "open"
