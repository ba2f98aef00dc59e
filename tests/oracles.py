"""Definitions to test against: brute force over subsets, and sums in 60-digit or in extended precision.

With e_i = exp(x_i), a k-subset S is drawn with probability proportional to prod_{i in S} e_i. All sums but brute force
multiply out factors 1 + e_i X, whose terms are positive: nothing cancels. Extended precision is far faster than 60
digits, and is itself tested against them.
"""

from collections.abc import Sequence
from itertools import combinations
from math import fsum

import numpy as np

from tests.exact import mp_log_odds, mp_marginals, mp_smooth_svm

__all__ = [
    "log_odds",
    "mp_log_odds",
    "mp_marginals",
    "mp_smooth_svm",
    "smooth_svm",
    "spot_log_odds",
    "subset_log_odds",
]


def subset_log_odds(x: Sequence[float], k: int) -> list[float]:
    """Log-odds of each class being in the k-subset, by summing over every subset: for n up to about 20."""
    subsets = np.array(list(combinations(range(len(x)), k)))
    logs = np.asarray(x, dtype=np.float64)[subsets].sum(1)
    weights = np.exp(logs - logs.max())
    holds = (subsets[:, :, None] == np.arange(len(x))).any(1)  # [subsets, n]
    return [float(np.log(fsum(weights[held])) - np.log(fsum(weights[~held]))) for held in holds.T]


def log_odds(x: Sequence[Sequence[float]], k: int) -> np.ndarray:
    """``mp_log_odds`` of rows [rows, n] in extended precision, at any scale of scores."""
    scores = np.asarray(x, dtype=np.longdouble)
    descending = np.sort(scores)[:, ::-1]
    kth, next_best = descending[:, k - 1, None], descending[:, k, None]
    # without one of the k best, the k-th best of the others is the next one
    d = scores - np.where(scores < kth, kth, next_best)
    sums = np.where(scores < kth, _leave_one_out(scores - kth, k), _leave_one_out(scores - next_best, k))
    return (d + np.log(sums[1] / sums[0])).astype(np.float64)


def smooth_svm(
    s: Sequence[float], labels: Sequence[int], k: int, taus: Sequence[float], alpha: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """``mp_smooth_svm`` in extended precision: losses [taus, labels] and gradients [taus, labels, n]."""
    scores, tau = np.asarray(s, dtype=np.longdouble), np.asarray(taus, dtype=np.longdouble)[:, None]
    rest = np.array([np.delete(np.arange(len(s)), y) for y in labels])  # [labels, n-1]
    kth = np.sort(scores[rest])[:, -k]
    d = (scores[rest] - kth[:, None]) / (k * tau[..., None])
    a, b = _factors(d)
    c = _products(a, b, k)[-1]
    z = alpha / tau - (scores[[*labels]] - kth) / (k * tau) + np.log(c[..., k] / c[..., k - 1])  # alpha/tau - l_y
    fading = np.exp(-np.abs(z))
    g = np.where(z > 0, 1, fading) / (1 + fading) / k
    _, d1, d2 = _leave_one_out(d, k)
    gradients = np.empty((*z.shape, len(s)))
    gradients[:, np.arange(len(labels)), [*labels]] = -g
    slopes = g[..., None] * a * (d1 / c[..., k, None] - d2 / c[..., k - 1, None])
    np.put_along_axis(gradients, np.broadcast_to(rest, slopes.shape), slopes, -1)
    return (tau * (np.maximum(z, 0) + np.log1p(fading))).astype(np.float64), gradients


def _leave_one_out(d: np.ndarray, k: int) -> np.ndarray:
    """Coefficients at k, k - 1 and k - 2 of the product of all factors but the i-th [3, ..., n].

    Where the k-th largest difference of those is zero, the k best classes contribute a product of ones, and so do the
    k - 1 best: nothing that underflows counts beside it.
    """
    a, b = _factors(d)
    before = _products(a, b, k)[:-1]
    after = _products(a[..., ::-1], b[..., ::-1], k)[-2::-1]
    sums = [(before[..., : j + 1] * after[..., : j + 1][..., ::-1]).sum(-1) for j in (k, k - 1, k - 2)]
    return np.moveaxis(np.stack(sums), 1, -1)


def _factors(d: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Factors b + a X that are proportional to 1 + exp(d) X; the larger of a and b is one."""
    return np.exp(np.minimum(d, 0)), np.exp(np.minimum(-d, 0))


def _products(a: np.ndarray, b: np.ndarray, k: int) -> np.ndarray:
    """Coefficients to degree k of the products of the first 0, 1, ... n factors b_i + a_i X [n+1, ..., k+1]."""
    c = np.zeros((a.shape[-1] + 1, *a.shape[:-1], k + 1), dtype=a.dtype)
    c[0, ..., 0] = 1
    for i in range(a.shape[-1]):
        c[i + 1] = b[..., i, None] * c[i]
        c[i + 1, ..., 1:] += a[..., i, None] * c[i, ..., :-1]
    return c


def spot_log_odds(x: Sequence[float], k: int, classes: Sequence[int]) -> list[float]:
    """Log-odds of a few classes of a long row: the Poisson-binomial distribution of the others, in extended precision.

    Good to 1e-13 while |l| is below 10,000; n = 100,000 and k = 500 take a second.
    """
    scores = np.asarray(x, dtype=np.longdouble)
    t = _tilt(scores, k)
    factors = np.stack([_sigmoid(t - scores), _sigmoid(scores - t)], 1)  # [n, 2]
    common, found = _product(np.delete(factors, classes, 0), k), []
    for i in classes:
        c = common
        for j in {*classes} - {i}:
            c = np.convolve(c, factors[j])
        found.append(float(scores[i] - t + np.log(c[k - 1]) - np.log(c[k])))
    return found


def _product(c: np.ndarray, k: int) -> np.ndarray:
    """Coefficients to degree k of the product of polynomials c [m, degree+1], a pair at a time."""
    while len(c) > 1:
        if len(c) % 2:
            c = np.concatenate([c, np.eye(1, c.shape[1], dtype=c.dtype)])  # times one
        left, right = c[::2], c[1::2]
        c = np.zeros((len(left), 2 * right.shape[1] - 1), dtype=c.dtype)
        for j in range(right.shape[1]):
            c[:, j : j + right.shape[1]] += left[:, j, None] * right
        c = c[:, : k + 1]
    return c[0]


def _tilt(x: np.ndarray, k: int) -> np.longdouble:
    """t with sum_i sigmoid(x_i - t) = k, nearly: any t cancels, this one keeps the coefficients at k near the mode."""
    reach = 2 * np.log(len(x))
    low, high = x.min() - reach, x.max() + reach
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if _sigmoid(x - middle).sum() > k else (low, middle)
    return low


def _sigmoid(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))
