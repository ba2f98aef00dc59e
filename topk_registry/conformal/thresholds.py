"""Thresholds: order statistics of calibration scores for a grid of miscoverage levels.

For N calibration scores, the threshold at level alpha is the ceil((N + 1)(1 - alpha))-th smallest score. If this order
exceeds N, the threshold is infinite. The score of a new sample is at most the threshold with probability at least 1 -
alpha. Without ties, this probability is less than 1 - alpha + 1 / (N + 1).

Orders are computed from alpha as an exact decimal fraction, because floating point is imprecise: it gives
7.000000000000001 for 0.07 of 100 samples.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

LEVELS = tuple(i / 200 for i in range(1, 101))  # 0.005 to 0.5
RULES = ("marginal", "per-class")


def as_fraction(alpha: float) -> Fraction:
    """Return alpha as an exact decimal fraction. Raise ValueError unless 0 < alpha < 1."""
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must be above 0 and below 1, got {alpha!r}; alpha 0.1 gives 90 % coverage")
    return Fraction(repr(float(alpha)))


def order_of(count: int, alpha: float) -> int:
    """Return ceil((count + 1)(1 - alpha)), the order of the threshold among ``count`` scores."""
    return math.ceil((count + 1) * (1 - as_fraction(alpha)))


def fewest(alpha: float) -> int:
    """Return the smallest number of calibration scores with a finite threshold: ceil(1 / alpha) - 1."""
    return math.ceil(1 / as_fraction(alpha)) - 1


def threshold(scores: np.ndarray, alpha: float) -> float:
    """Return the threshold of calibration scores [N] at one level."""
    return float(_thresholds(np.sort(_checked(scores)), (alpha,))[0])


def threshold_table(
    scores: np.ndarray, labels: np.ndarray, n: int, *, rule: str = "marginal", levels: Sequence[float] = LEVELS
) -> np.ndarray:
    """Return the thresholds of every level: [G, 1] with the rule ``"marginal"``, [G, n] with ``"per-class"``.

    Args:
        scores: scores of calibration samples at their labels [N].
        labels: labels of the same samples [N].
        n: number of classes.
        rule: ``"marginal"`` or ``"per-class"``. If a class has fewer than ``fewest(alpha)`` samples, its threshold is
            infinite at this level, and every set contains the class.
        levels: miscoverage levels [G].
    """
    if rule not in RULES:
        raise ValueError(f"rule must be one of {', '.join(RULES)}, got {rule!r}")
    values, labels = _checked(scores), check_labels(labels, n)
    if values.shape != labels.shape:
        raise ValueError(f"expected one score per label, got {list(values.shape)} and {list(labels.shape)}")
    if rule == "marginal":
        return _thresholds(np.sort(values), levels)[:, None]
    order = np.lexsort((values, labels))
    parts = np.split(values[order], np.searchsorted(labels[order], np.arange(1, n)))
    return np.stack([_thresholds(part, levels) for part in parts], 1)


def check_labels(labels: np.ndarray, n: int) -> np.ndarray:
    """Return labels as int64 [N]. Raise ValueError unless all are class indices from 0 to n - 1."""
    given = np.asarray(labels)
    if given.ndim != 1 or not np.issubdtype(given.dtype, np.integer):
        raise ValueError(f"labels must be integer class indices [N], got {given.dtype} {list(given.shape)}")
    wrong = (given < 0) | (given >= n)
    if wrong.any():
        raise ValueError(f"the data has label {given[wrong][0]}, but the model has the classes 0 to {n - 1}")
    return given.astype(np.int64)


def _thresholds(ordered: np.ndarray, levels: Sequence[float]) -> np.ndarray:
    padded = np.append(ordered, np.inf)  # for orders beyond the last score
    return padded[[min(order_of(len(ordered), alpha), len(padded)) - 1 for alpha in levels]]


def _checked(scores: np.ndarray) -> np.ndarray:
    values = np.asarray(scores)
    if np.isnan(values).any():
        raise ValueError(f"{int(np.isnan(values).sum())} of {values.size} calibration scores are NaN")
    return values
