"""Computation of the thresholds of prediction sets from the scores of calibration samples.

The score of a sample is high if the true class fits the sample badly. From the scores of N samples, the threshold for
a number alpha is the j-th smallest score, where j = ceil((N + 1)(1 - alpha)). If j is larger than N, the threshold is
infinite. The score of a new sample is at most the threshold with a probability of at least 1 - alpha. If no two scores
are equal, this probability is below 1 - alpha + 1 / (N + 1).

j is computed in exact fractions, because a rounding error in floating point could change the result of ceil.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

LEVELS = tuple(i / 200 for i in range(1, 101))  # 0.005 to 0.5
RULES = ("marginal", "per-class")


def as_fraction(alpha: float) -> Fraction:
    """Return the fraction with the decimal text of ``alpha``: 1/10 for 0.1. Unless 0 < alpha < 1, raise ValueError."""
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must be above 0 and below 1, got {alpha!r}; alpha 0.1 gives 90 % coverage")
    return Fraction(repr(float(alpha)))


def order_of(count: int, alpha: float) -> int:
    """Return j = ceil((count + 1)(1 - alpha)). The threshold for alpha is the j-th smallest of ``count`` scores."""
    return math.ceil((count + 1) * (1 - as_fraction(alpha)))


def fewest(alpha: float) -> int:
    """Return the smallest number of calibration scores for which the threshold is finite: ceil(1 / alpha) - 1."""
    return math.ceil(1 / as_fraction(alpha)) - 1


def threshold(scores: np.ndarray, alpha: float) -> float:
    """Return the j-th smallest of N calibration scores, where j = ceil((N + 1)(1 - alpha)).

    If j is larger than N, return infinity. If a score is NaN, raise ValueError.
    """
    return float(_thresholds(np.sort(_checked(scores)), (alpha,))[0])


def threshold_table(
    scores: np.ndarray, labels: np.ndarray, n: int, *, rule: str = "marginal", levels: Sequence[float] = LEVELS
) -> np.ndarray:
    """Return the thresholds of prediction sets, with one row per miscoverage level: [G, 1] or [G, n].

    A set contains each class whose nonconformity score is at most the threshold. The score is high if the class fits
    the sample badly. From fewer than ceil(1 / alpha) - 1 scores, the threshold for a level alpha is infinite.

    Args:
        scores: nonconformity score of each calibration sample at its label: [N].
        labels: labels of the same samples: [N].
        n: number of classes.
        rule: With ``"marginal"``, a row has one threshold, computed from all scores. With ``"per-class"``, a row has
            one threshold per class, computed from the samples with this label.
        levels: miscoverage levels, the allowed probabilities that a set does not contain the true class: [G].
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
    """Return the labels as int64 [N]. If a label is not an integer from 0 to n - 1, raise ValueError."""
    given = np.asarray(labels)
    if given.ndim != 1 or not np.issubdtype(given.dtype, np.integer):
        raise ValueError(f"labels must be integer class indices [N], got {given.dtype} {list(given.shape)}")
    wrong = (given < 0) | (given >= n)
    if wrong.any():
        raise ValueError(f"the data has label {given[wrong][0]}, but the model has the classes 0 to {n - 1}")
    return given.astype(np.int64)


def _thresholds(ordered: np.ndarray, levels: Sequence[float]) -> np.ndarray:
    padded = np.append(ordered, np.inf)  # the threshold if j is larger than the number of scores
    return padded[[min(order_of(len(ordered), alpha), len(padded)) - 1 for alpha in levels]]


def _checked(scores: np.ndarray) -> np.ndarray:
    values = np.asarray(scores)
    if np.isnan(values).any():
        raise ValueError(f"{int(np.isnan(values).sum())} of {values.size} calibration scores are NaN")
    return values
