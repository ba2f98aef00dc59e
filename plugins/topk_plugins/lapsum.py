r"""LapSum: a soft top-k whose weights are distribution functions of the Laplace law.

    p_i = F((s_i - b) / tau),  F(u) = e^u / 2 for u <= 0, else 1 - e^{-u} / 2,  with b such that sum_i p_i = k.

Between two neighbouring scores the sum is m - B e^b + A e^{-b}, with m scores above b, A = sum e^{x_i} / 2 over those
below and B = sum e^{-x_i} / 2 over those above (x = s / tau). So b follows from sorted scores and one quadratic, in
O(n log n). k may be any real number between 0 and n. The Jacobian is diag(d) - d q^T, d_i = e^{-|x_i - b|} / (2 tau)
and q = d / sum d.
"""

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from topk_registry import ClassificationLoss

REACH = 600.0  # e^600 is a double; where b is no integer rank, it lies within log(n / |k - m|) of a score


class LapSum(ClassificationLoss):
    r"""Negative log of the label's weight in LapSum's soft top-k.

    .. math:: L(s, y) = -\log p_y, \qquad p_i = F\Bigl(\frac{s_i - b}{\tau}\Bigr), \qquad \sum_i p_i = k

    F is the distribution function of the Laplace law. Scores are sorted and computed with in double precision.

    Use when:
        K is no whole number, or you compare soft top-k operators.

    Avoid when:
        Speed counts: it sorts every row in double precision. ``topk_nll`` asks nearly the same, with compiled kernels.

    Args:
        k: how many classes are chosen, 0 < k < n; it may be any real number.
        tau: temperature, positive; towards 0 the weights become the hard top-k.
        weight, reduction, label_smoothing, ignore_index: as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> LapSum(k=2)(torch.zeros(1, 4), torch.tensor([0]))
        tensor(0.6931)

    Reference: Struski, Bednarczyk, Podolak, Tabor. LapSum: One Method to Differentiate Them All: Ranking, Sorting and
    Top-k Selection. ICML 2025.
    """

    option_ranges: ClassVar = {"k": "(0, n)", "tau": "(0, inf)"}
    tuning_grid: ClassVar = {"tau": (0.3, 1.0, 3.0)}

    def __init__(
        self,
        k: float = 5,
        *,
        tau: float = 1.0,
        weight: Tensor | Sequence[float] | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
    ) -> None:
        super().__init__(weight=weight, reduction=reduction, label_smoothing=label_smoothing, ignore_index=ignore_index)
        if not 0.0 < k < math.inf:
            raise ValueError(f"k must be a number above 0 and below the number of classes, got {k!r}")
        if not 0.0 < tau < math.inf:
            raise ValueError(f"tau must be positive and finite, got {tau!r}")
        self.k, self.tau = k, float(tau)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        n = logits.shape[min(1, logits.ndim - 1)] if logits.ndim else 0
        if n > 1 and self.k >= n:
            raise ValueError(f"k must be below the number of classes: k = {self.k}, logits have {n}")
        return super().forward(logits, target)

    def per_label(self, logits: Tensor, label: Tensor) -> Tensor:
        x = logits.double() / self.tau
        b = threshold(x, self.k)
        return -_log_chance(x.gather(1, label[:, None])[:, 0] - b).to(logits.dtype)

    def per_class(self, logits: Tensor) -> Tensor:
        x = logits.double() / self.tau
        return -_log_chance(x - threshold(x, self.k)[:, None]).to(logits.dtype)

    def extra_repr(self) -> str:
        return f"k={self.k:g}, tau={self.tau:g}, {super().extra_repr()}"


def threshold(x: Tensor, k: float) -> Tensor:
    """b [B] with sum_i F(x_i - b) = k of rows x [B, n]; twice differentiable where no score equals b."""
    b = _solve(x.detach(), k)
    # Newton's steps change b by rounding, and give it its derivatives: one step the first, two steps the second
    return _step(x, _step(x, b, k), k)


def _solve(x: Tensor, k: float) -> Tensor:
    """b in closed form. Sums of exponentials are kept as logarithms, so that any gap between scores is bridged."""
    n = x.shape[1]
    x = x.sort(-1, descending=True).values
    below = x.flip(-1).logcumsumexp(-1).flip(-1)  # log sum of e^x over ranks j, j + 1, ... n
    above = (-x).logcumsumexp(-1)  # log sum of e^-x over ranks 1, ... j
    ranks = torch.arange(1, n + 1, dtype=x.dtype, device=x.device)
    sums = ranks - 0.5 * (above + x).exp() + 0.5 * ((below - x).exp() - 1)  # sum_i F(x_i - x_j), rising with j
    m = (sums < k).sum(-1, keepdim=True)  # the number of scores above b
    nothing = torch.full_like(x[:, :1], -torch.inf)
    log_a = torch.cat((below, nothing), 1).gather(1, m)[:, 0]  # log 2A
    log_b = torch.cat((nothing, above), 1).gather(1, m)[:, 0]  # log 2B
    excess = m[:, 0].to(x.dtype) - k
    # B v^2 - excess v - A = 0 for v = e^b, by the form of the root that adds
    product = torch.where(excess == 0, log_a + log_b, log_a + log_b - 2 * excess.abs().log())
    root = torch.where(excess == 0, product / 2, excess.abs().log() + torch.log1p(torch.sqrt(1 + product.exp())))
    return torch.where(excess >= 0, root - log_b, log_a - root)


def _step(x: Tensor, b: Tensor, k: float) -> Tensor:
    """One step of Newton's method for sum_i F(x_i - b) = k, with tails relative to the largest."""
    distance = (x - b[:, None]).abs()
    nearest = distance.detach().amin(-1, keepdim=True)
    tails = 0.5 * (nearest - distance).exp()
    above = (x > b[:, None]).detach()
    excess = above.sum(-1).to(x.dtype) - k
    whole = torch.where(excess == 0, 0.0, excess * nearest[:, 0].clamp(max=REACH).exp())
    return b + (whole + torch.where(above, -tails, tails).sum(-1)) / tails.sum(-1)


def _log_chance(u: Tensor) -> Tensor:
    """log F(u), exact in both tails."""
    right = torch.log1p(-0.5 * (-u.clamp(min=0.0)).exp())
    return torch.where(u > 0, right, u - math.log(2))
