"""Means over runs with their confidence, and whether one loss beats another."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from topk_studies.engine.study import Estimate, Note

# 97.5 % quantiles of Student's t distribution for 1, 2, ... degrees of freedom
T975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
        2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)  # fmt: skip


def estimate(values: Sequence[float]) -> Estimate | None:
    """Mean and 95 % confidence interval (Student's t) of runs that differ in their seed; None for no run."""
    if not values:
        return None
    n = len(values)
    if n == 1:
        return Estimate(values[0], math.nan, 1)
    t = T975[n - 2] if n - 2 < len(T975) else 1.96
    return Estimate(fmean(values), t * stdev(values) / math.sqrt(n), n)


def difference(first: Mapping[int, float], second: Mapping[int, float]) -> Estimate | None:
    """The first less the second, values by seed, paired; None where no seed has both."""
    return estimate([first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())])


def judge(claim: str, gap: Estimate | None, of: str) -> Note:
    """What runs say of a paper's claim that a difference is above 0.

    They agree, or differ, where the 95 % confidence interval of the difference excludes 0, and leave it open elsewhere.
    """
    if gap is None:
        return Note(claim, "open", f"{of}: not measured")
    verdict = "agrees" if gap.low > 0 else "differs" if gap.high < 0 else "open"
    interval = "" if math.isnan(gap.half_width) else f" ± {gap.half_width:.2f}"
    seeds = f"{gap.count} seed{'s' if gap.count > 1 else ''}"
    return Note(claim, verdict, f"{of}: {gap.mean:+.2f}{interval} points ({seeds})")
