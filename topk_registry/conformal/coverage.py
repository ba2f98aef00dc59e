"""Exact confidence intervals for a proportion, such as the share of test samples whose set contains the true class.

The ends of the interval are quantiles of Beta distributions. A quantile is found by bisection of the distribution
function. For integers a and b, this function is P(Beta(a, b) <= x) = P(Binomial(a + b - 1, x) >= a).
"""

import math

import numpy as np


def binomial_interval(hits: int, total: int, *, level: float = 0.95) -> tuple[float, float]:
    """Return the exact (Clopper-Pearson) confidence interval (low, high) of a proportion.

    Args:
        hits: number of samples with the property, such as samples whose set contains the true class.
        total: number of all samples, at least 1.
        level: confidence level.

    Raises:
        ValueError: ``hits`` is below 0 or above ``total``, ``total`` is below 1, or ``level`` is not in (0, 1).
    """
    if not 0 <= hits <= total or total < 1:
        raise ValueError(f"expected 0 <= hits <= total and total >= 1, got {hits} of {total}")
    if not 0 < level < 1:
        raise ValueError(f"level must be above 0 and below 1, got {level!r}")
    tail = (1 - level) / 2
    low = beta_quantile(tail, hits, total - hits + 1) if hits else 0.0
    high = beta_quantile(1 - tail, hits + 1, total - hits) if hits < total else 1.0
    return low, high


def beta_quantile(p: float, a: int, b: int) -> float:
    """Return the number x with P(Beta(a, b) <= x) = p, for integers a, b >= 1 and 0 < p < 1."""
    choose = _log_choose(a + b - 1)
    low, high = 0.0, 1.0
    for _ in range(60):
        x = (low + high) / 2
        low, high = (x, high) if _upper_tail(x, a, choose) < p else (low, x)
    return (low + high) / 2


def _log_choose(m: int) -> np.ndarray:
    """Return an array of length m + 1. Entry i is the logarithm of the binomial coefficient (m choose i)."""
    i = np.arange(1, m + 1)
    return np.concatenate(([0.0], np.cumsum(np.log((m + 1 - i) / i))))


def _upper_tail(x: float, a: int, log_choose: np.ndarray) -> float:
    """Return P(Binomial(m, x) >= a), where ``log_choose`` is the result of ``_log_choose(m)``."""
    m = len(log_choose) - 1
    i = np.arange(m + 1)
    terms = np.exp(log_choose + i * math.log(x) + (m - i) * math.log1p(-x))
    # only the smaller of the two tails is summed, because the sum of the smaller tail has a smaller rounding error
    return float(terms[a:].sum()) if a > x * m else 1.0 - float(terms[:a].sum())
