"""Definitions to test against: brute force over subsets, and exact sums in 60-digit arithmetic.

With e_i = exp(x_i), a k-subset S is drawn with probability proportional to prod_{i in S} e_i. The sums over the subsets
without class i are the coefficients of prod_{j != i} (1 + e_j X); here they are convolved from the product of the
classes before i and that of the classes after it, so that every term is positive and nothing cancels. ``decimal``
rounds correctly, carries exponents up to 10^18 (no score can overflow) and is a hundred times faster than ``mpmath``.
"""

from collections import deque
from collections.abc import Sequence
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, localcontext
from itertools import accumulate, combinations, pairwise
from math import fsum

import numpy as np
import torch
from torch import Tensor

EXACT = Context(prec=60, Emax=MAX_EMAX, Emin=MIN_EMIN)
FAR = Decimal(10) ** 15


def subset_log_odds(x: Sequence[float], k: int) -> list[float]:
    """Log-odds of each class being in the k-subset, by summing over every subset: for n up to about 20."""
    subsets = np.array(list(combinations(range(len(x)), k)))
    logs = np.asarray(x, dtype=np.float64)[subsets].sum(1)
    weights = np.exp(logs - logs.max())
    holds = (subsets[:, :, None] == np.arange(len(x))).any(1)  # [subsets, n]
    return [float(np.log(fsum(weights[held])) - np.log(fsum(weights[~held]))) for held in holds.T]


def mp_log_odds(x: Sequence[float | Decimal], k: int) -> list[float]:
    """Log-odds l_i = log(e_i sigma_{k-1}(e without i) / sigma_k(e without i)), exact before the last rounding."""
    with localcontext(EXACT):
        return [float(odds.ln()) for odds in _odds([Decimal(v) for v in x], k)]


def mp_marginals(x: Sequence[float], k: int) -> list[float]:
    """Probability that each class is in the k-subset; they sum to k."""
    with localcontext(EXACT):
        return [float(odds / (1 + odds)) for odds in _odds([Decimal(v) for v in x], k)]


def mp_smooth_svm(s: Sequence[float], y: int, k: int, tau: float, alpha: float = 1.0) -> tuple[float, list[float]]:
    """Smooth top-k SVM loss tau softplus(alpha/tau - l_y) at scores s and label y, and its gradient [n], at any tau."""
    with localcontext(EXACT):
        x = [Decimal(v) / (k * Decimal(tau)) for v in s]
        others = x[:y] + x[y + 1 :]
        t = sorted(others)[-k]  # a shift cancels; beyond e^+-FAR a class is in every set that matters, or in none
        e = [min(max(v - t, -FAR), FAR).exp() for v in others]
        c = _product(e, k)
        z = Decimal(alpha) / Decimal(tau) - (x[y] - t) + (c[k] / c[k - 1]).ln()  # alpha/tau - l_y
        fading = (-abs(z)).exp()
        g = (1 if z > 0 else fading) / (1 + fading) / k
        without = _leave_one_out(e, [k - 1, k - 2])
        gradient = [float(g * w * (d1 / c[k] - d2 / c[k - 1])) for w, (d1, d2) in zip(e, without, strict=True)]
        gradient.insert(y, float(-g))
        return float(Decimal(tau) * (max(z, Decimal(0)) + (1 + fading).ln())), gradient


def smooth_svm_over_masses(s: Tensor, q: Tensor, k: int, tau: float, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """The sums [B] of the losses of rows s [B, n] at all classes, times the masses q [B, n], and gradients [B, n]."""
    losses, gradients = torch.zeros(len(s), dtype=torch.float64), torch.zeros(s.shape, dtype=torch.float64)
    for i, y in q.nonzero().tolist():
        loss, gradient = mp_smooth_svm(s[i].tolist(), y, k, tau, float(alpha[y] if alpha.ndim else alpha))
        losses[i] += float(q[i, y]) * loss
        gradients[i] += float(q[i, y]) * torch.tensor(gradient, dtype=torch.float64)
    return losses, gradients


def _odds(x: list[Decimal], k: int) -> list[Decimal]:
    e = [v.exp() for v in x]
    return [w * d1 / d0 for w, (d1, d0) in zip(e, _leave_one_out(e, [k - 1, k]), strict=True)]


def _leave_one_out(e: list[Decimal], degrees: list[int]) -> list[list[Decimal]]:
    """sigma_j(e without i) for each i and each of the degrees j."""
    before = list(accumulate(e, _multiply, initial=_one(max(degrees))))
    after = list(accumulate(reversed(e), _multiply, initial=_one(max(degrees))))[::-1]
    return [
        [sum((before[i][a] * after[i + 1][j - a] for a in range(j + 1)), Decimal(0)) for j in degrees]
        for i in range(len(e))
    ]


def _product(e: list[Decimal], k: int) -> list[Decimal]:
    return deque(accumulate(e, _multiply, initial=_one(k)), maxlen=1).pop()


def _multiply(c: list[Decimal], w: Decimal) -> list[Decimal]:
    """Coefficients of c(X) (1 + w X), to the degree that c has."""
    return [c[0], *(high + w * low if low else high for low, high in pairwise(c))]


def _one(k: int) -> list[Decimal]:
    return [Decimal(1), *[Decimal(0)] * k]


def perturbed_kth(scores: Tensor, k: int, *, epsilon: float, noise: Tensor) -> Tensor:
    """The k-th largest of scores [..., n] + epsilon * noise [draws, ..., n], averaged over the draws: [...]."""
    perturbed = scores + epsilon * noise  # [draws, ..., n]
    return perturbed.sort(-1, descending=True).values[..., k - 1].mean(0)
