"""Paired tests of classifiers on the same images: exact McNemar, bootstrap over images, correction for many tests."""

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from topk_registry.analysis.measures import Floats, Integers
from topk_registry.oldsets.coverage import beta_cdf

DRAWN = 1 << 22  # images drawn at a time, over all resamples of a block: 32 MB
POWER = 0.8  # the probability of a decision that a number of images is asked for


def mcnemar(gained: int, lost: int, *, mid: bool = False) -> float:
    """Return the p-value of McNemar's exact test, two-sided.

    Of the images on which two classifiers differ, each is as likely to be gained as lost where they are equally often
    right: ``gained`` is then Binomial(gained + lost, 1/2).

    Args:
        gained: how many images the second has right and the first wrong.
        lost: how many it is the other way round.
        mid: count the observed number half. The mid-p value is less conservative, and no longer exact.

    Example:
        >>> mcnemar(1, 9)
        0.021484375

    Reference: McNemar 1947; Fagerland, Lydersen, Laake 2013 (the mid-p version).
    """
    if min(gained, lost) < 0:
        raise ValueError(f"counts of images are at least 0, got {gained} and {lost}")
    total, fewer = gained + lost, min(gained, lost)
    if not total:
        return 1.0
    tail = beta_cdf(0.5, total - fewer, fewer + 1)  # P(Binomial(total, 1/2) <= fewer)
    if mid:
        choose = math.lgamma(total + 1) - math.lgamma(fewer + 1) - math.lgamma(total - fewer + 1)
        tail -= 0.5 * math.exp(choose - total * math.log(2))
    return min(1.0, 2 * tail)


def holm(p_values: Sequence[float], groups: Sequence[Hashable] | None = None) -> list[float]:
    """Return p-values adjusted for their number by Holm's step-down method.

    Rejecting those of at most alpha makes any false rejection at all with probability at most alpha.

    Args:
        p_values: of the tests.
        groups: of each test the group that it belongs to, where at most one null hypothesis of a group can be true; a
            group then counts once, until all of its tests are rejected.

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]

    Reference: Holm 1979; Shaffer 1986 (nulls of which not all can be true).
    """
    names: list[Hashable] = list(range(len(p_values)) if groups is None else groups)
    if len(names) != len(p_values):
        raise ValueError(f"expected a group for each of {len(p_values)} p-values, got {len(names)}")
    if wrong := [p for p in p_values if not 0 <= p <= 1]:
        raise ValueError(f"p-values must be from 0 to 1, got {wrong[0]!r}")
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    left = {name: names.count(name) for name in names}
    adjusted, reached = [1.0] * len(p_values), 0.0
    for i in order:
        reached = max(reached, min(1.0, len(left) * p_values[i]))
        adjusted[i] = reached
        left[names[i]] -= 1
        if not left[names[i]]:
            del left[names[i]]
    return adjusted


def resamples(images: int, count: int, seed: int) -> Iterator[Floats]:
    """Yield blocks [b, N] that say how often each image was drawn, N draws of N with replacement a row."""
    rng = np.random.default_rng(seed)
    size = max(1, DRAWN // images)
    for start in range(0, count, size):
        rows = min(size, count - start)
        drawn = rng.integers(0, images, (rows, images)) + images * np.arange(rows)[:, None]
        yield np.bincount(drawn.ravel(), minlength=rows * images).reshape(rows, images).astype(np.float64)


Statistic = Callable[[Floats], Floats]


def mean_of(values: Floats) -> Statistic:
    """The mean of a value of each image [N], as a function of the draws [b, N]."""
    return lambda drawn: drawn @ values / len(values)


def macro_mean_of(values: Floats, labels: Integers) -> Statistic:
    """The mean over classes of the mean over their images; classes of which no image was drawn are left out.

    Args:
        values: of the images [N], those of a class side by side.
        labels: of the images, sorted.
    """
    _, starts = np.unique(labels, return_index=True)

    def statistic(drawn: Floats) -> Floats:
        seen = np.add.reduceat(drawn, starts, axis=1)  # [b, classes]
        total = np.add.reduceat(drawn * values, starts, axis=1)
        means = np.divide(total, seen, out=np.zeros_like(total), where=seen > 0)
        return means.sum(1) / (seen > 0).sum(1)

    return statistic


@dataclass(frozen=True)
class Interval:
    """A difference with its bootstrap interval.

    Args:
        value: on the images themselves.
        low, high: of the interval.
        deviation: standard deviation over resamples.
    """

    value: float
    low: float
    high: float
    deviation: float


def interval(value: float, drawn: Floats, level: float) -> Interval:
    """The percentile interval of a value, from the values of resamples [B]."""
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, float(low), float(high), float(drawn.std(ddof=1)))


def difference_p(drawn: Floats) -> float:
    """The two-sided p-value of "no difference", from the differences of resamples [B]."""
    below, above = (drawn <= 0).sum(), (drawn >= 0).sum()
    return float(min(1.0, 2 * (1 + min(below, above)) / (1 + len(drawn))))


def equivalence_p(drawn: Floats, margin: float) -> float:
    """The p-value of "a difference of at least the margin", the larger one of two one-sided tests."""
    beyond = max((drawn >= margin).sum(), (drawn <= -margin).sum())
    return float((1 + beyond) / (1 + len(drawn)))


def images_needed(images: int, difference: Interval, margin: float, alpha: float) -> int | None:
    """About how many images would decide, if the difference and its spread stay what they are.

    The smaller one of the numbers that would show the difference, and that would show it to be within the margin, each
    with probability 0.8. None where neither can ever be shown.
    """
    normal = NormalDist()
    reach = normal.inv_cdf(POWER)
    needed = [
        images * ((normal.inv_cdf(level) + reach) * difference.deviation / gap) ** 2
        for level, gap in ((1 - alpha / 2, abs(difference.value)), (1 - alpha, margin - abs(difference.value)))
        if gap > 0
    ]
    return math.ceil(min(needed)) if needed and difference.deviation > 0 else None
