"""The distribution of coverage, and exact intervals, from sums of binomial probabilities.

For N calibration scores without ties, the coverage of the threshold at order j = ceil((N + 1)(1 - alpha)) has the
distribution Beta(j, N + 1 - j). For integers a and b, P(Beta(a, b) <= x) = P(Binomial(a + b - 1, x) >= a).
"""

import math

import numpy as np

from topk_registry.conformal.thresholds import order_of


def coverage_law(count: int, alpha: float) -> tuple[int, int]:
    """Return the parameters (j, N + 1 - j) of the Beta distribution of coverage for N = ``count``."""
    order = order_of(count, alpha)
    if order > count:
        raise ValueError(f"{count} calibration scores are too few for alpha {alpha:g}: the threshold is infinite")
    return order, count + 1 - order


def binomial_interval(hits: int, total: int, *, level: float = 0.95) -> tuple[float, float]:
    """Return the exact (Clopper-Pearson) interval of a proportion for ``hits`` of ``total`` samples."""
    if not 0 <= hits <= total or total < 1:
        raise ValueError(f"expected 0 <= hits <= total and total >= 1, got {hits} of {total}")
    tail = (1 - level) / 2
    low = beta_quantile(tail, hits, total - hits + 1) if hits else 0.0
    high = beta_quantile(1 - tail, hits + 1, total - hits) if hits < total else 1.0
    return low, high


def beta_cdf(x: float, a: int, b: int) -> float:
    """Return P(Beta(a, b) <= x) for integers a, b >= 1."""
    if not 0 < x < 1:
        return float(x >= 1)
    return _upper_tail(x, a, _log_choose(a + b - 1))


def beta_quantile(p: float, a: int, b: int) -> float:
    """Return the x with P(Beta(a, b) <= x) = p, by bisection."""
    choose = _log_choose(a + b - 1)
    low, high = 0.0, 1.0
    for _ in range(60):
        x = (low + high) / 2
        low, high = (x, high) if _upper_tail(x, a, choose) < p else (low, x)
    return (low + high) / 2


def _log_choose(m: int) -> np.ndarray:
    """Return the logarithms of the binomial coefficients (m choose i) [m + 1]."""
    i = np.arange(1, m + 1)
    return np.concatenate(([0.0], np.cumsum(np.log((m + 1 - i) / i))))


def _upper_tail(x: float, a: int, log_choose: np.ndarray) -> float:
    """Return P(Binomial(m, x) >= a), computed from the smaller of the two tails."""
    m = len(log_choose) - 1
    i = np.arange(m + 1)
    terms = np.exp(log_choose + i * math.log(x) + (m - i) * math.log1p(-x))
    return float(terms[a:].sum()) if a > x * m else 1.0 - float(terms[:a].sum())
