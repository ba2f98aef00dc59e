"""The k-subset operator as written in its definition: by enumeration, and in numbers of many digits."""

from itertools import combinations

import mpmath
import torch
from mpmath import mp
from torch import Tensor

DIGITS = 40


def log_odds_by_enumeration(x: Tensor, k: int) -> Tensor:
    """l [n] of x [n] by summing over every k-subset, in double precision; for n up to about 12."""
    x, n = x.double(), len(x)
    weights = {S: x[list(S)].sum() for S in combinations(range(n), k)}
    out = []
    for i in range(n):
        inside = torch.stack([w for S, w in weights.items() if i in S]).logsumexp(0)
        out.append(inside - torch.stack([w for S, w in weights.items() if i not in S]).logsumexp(0))
    return torch.stack(out)


def _products(odds: list, k: int) -> list[list]:
    """Coefficients 0..k of the products of the first i factors 1 + w X, for every i."""
    products = [[mp.mpf(1)] + [mp.mpf(0)] * k]
    for w in odds:
        c = products[-1]
        products.append([c[0], *(c[j] + w * c[j - 1] for j in range(1, k + 1))])
    return products


def label_margin(s: Tensor, y: int, k: int, theta: float) -> tuple[mpmath.mpf, list]:
    """The margin of class y of a row s [n] and its gradient [n], by sums of positive terms."""
    with mpmath.workdps(DIGITS):
        scores = [mp.mpf(float(v)) for v in s]
        others = scores[:y] + scores[y + 1 :]
        odds = [mp.exp((v - max(others)) / mp.mpf(theta)) for v in others]
        before, after = _products(odds, k), _products(odds[::-1], k)[::-1]
        c = before[-1]
        margin = scores[y] - max(others) + mp.mpf(theta) * mp.log(c[k - 1] / c[k])
        gradient = []
        for i, w in enumerate(odds):  # without class i: coefficients k - 2 and k - 1
            low, high = (
                sum((before[i][j] * after[i + 1][d - j] for j in range(d + 1)), mp.mpf(0)) for d in (k - 2, k - 1)
            )
            gradient.append(w * (low / c[k - 1] - high / c[k]))
        return margin, [*gradient[:y], mp.mpf(1), *gradient[y:]]


def smooth_topk(s: Tensor, q: Tensor, k: int, tau: float, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """The losses [B] and gradients [B, n] of rows s [B, n] with masses q [B, n], rounded to double precision."""
    losses, gradients = [], []
    with mpmath.workdps(DIGITS):
        for row, masses in zip(s, q, strict=True):
            loss, gradient = mp.mpf(0), [mp.mpf(0)] * len(row)
            for y in masses.nonzero()[:, 0].tolist():
                margin, slope = label_margin(row, y, k, k * tau)
                gap = mp.mpf(float(alpha[y] if alpha.ndim else alpha))
                z = (gap - margin / k) / mp.mpf(tau)
                mass = mp.mpf(float(masses[y]))
                loss += mass * mp.mpf(tau) * mp.log1p(mp.exp(z))
                of_margin = -mass / k / (1 + mp.exp(-z))
                gradient = [g + of_margin * v for g, v in zip(gradient, slope, strict=True)]
            losses.append(float(loss))
            gradients.append([float(g) for g in gradient])
    return torch.tensor(losses, dtype=torch.float64), torch.tensor(gradients, dtype=torch.float64)
