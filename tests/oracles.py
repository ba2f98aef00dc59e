"""Definitions to test against: brute force over subsets, and exact sums in 60-digit or extended arithmetic.

With e_i = exp(x_i), a k-subset S is drawn with probability proportional to prod_{i in S} e_i.
"""

from collections.abc import Sequence
from itertools import combinations
from math import fsum

import numpy as np

from topk_studies.baselines.exact import mp_log_odds, mp_marginals, mp_smooth_svm

__all__ = ["mp_log_odds", "mp_marginals", "mp_smooth_svm", "spot_log_odds", "subset_log_odds"]


def subset_log_odds(x: Sequence[float], k: int) -> list[float]:
    """Log-odds of each class being in the k-subset, by summing over every subset: for n up to about 20."""
    subsets = np.array(list(combinations(range(len(x)), k)))
    logs = np.asarray(x, dtype=np.float64)[subsets].sum(1)
    weights = np.exp(logs - logs.max())
    holds = (subsets[:, :, None] == np.arange(len(x))).any(1)  # [subsets, n]
    return [float(np.log(fsum(weights[held])) - np.log(fsum(weights[~held]))) for held in holds.T]


def spot_log_odds(x: Sequence[float], k: int, classes: Sequence[int]) -> list[float]:
    """Log-odds of a few classes of a long row: the Poisson-binomial recursion in extended precision, once a class.

    Good to 1e-13 while |l| is below 10,000; n = 100,000 and k = 500 take seconds.
    """
    scores = np.asarray(x, dtype=np.longdouble)
    t = _tilt(scores, k)
    p, q = _sigmoid(scores - t), _sigmoid(t - scores)
    c = np.zeros((len(classes), k + 1), dtype=np.longdouble)
    c[:, 0] = 1
    own = {i: row for row, i in enumerate(classes)}
    for i in range(len(x)):
        kept = c[own[i]].copy() if i in own else None
        c[:, 1:] = q[i] * c[:, 1:] + p[i] * c[:, :-1]
        c[:, 0] *= q[i]
        if kept is not None:
            c[own[i]] = kept
    return [float(scores[i] - t + np.log(c[row, k - 1]) - np.log(c[row, k])) for i, row in own.items()]


def _tilt(x: np.ndarray, k: int) -> np.longdouble:
    """t with sum_i sigmoid(x_i - t) = k: any t cancels, this one keeps the coefficients at k near the mode."""
    reach = 2 * np.log(len(x))
    low, high = x.min() - reach, x.max() + reach
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _sigmoid(x - middle).sum() > k else (low, middle)
    return low


def _sigmoid(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))
