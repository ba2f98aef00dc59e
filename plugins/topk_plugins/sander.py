r"""Sparse top-k: the hard top-k mask, smoothed by a quadratic term so that it stays sparse.

    mask(x, k) = argmax_mu  x mu - |mu|^2 / 2  over 0 <= mu <= 1, sum mu = k  =  clip(x - theta, 0, 1),  x = s / tau

is Sander et al.'s top-k mask for p = 2. The loss compares the value of this maximum with that of the best mu that holds
the label entirely, as the smooth top-k SVM does with sums over sets. It is the sparsemax loss for k = 1.
"""

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from topk_registry import TopKLoss


class SparseTopK(TopKLoss):
    r"""How much the best sparse mask gains over the best one that holds the label.

    .. math:: L(s, y) = \tau \Bigl(\max_{\mu} \Omega(\mu) - \max_{\mu: \mu_y = 1} \Omega(\mu)\Bigr), \qquad
        \Omega(\mu) = \frac{s^\top \mu}{\tau} - \frac12 \|\mu\|^2

    over :math:`0 \le \mu \le 1, \sum_i \mu_i = k`. The mask is the paper's for p = 2; the loss is this
    package's own construction on it. It is 0 where the label is in the mask entirely: when its score is tau above the
    (k+1)-th, as with a hinge. Gradients are differences of two masks, and sparse.

    Use when:
        Gradients should be exactly zero for classes that do not compete for the k places.

    Avoid when:
        Speed counts: each row solves two small problems in double precision, and soft targets many. ``topk_nll`` is
        the dense counterpart.

    Args:
        k: size of the set that should hold the label, 1 <= k <= n - 1.
        tau: how strong the quadratic term is, positive; towards 0 the mask becomes hard.
        weight, reduction, label_smoothing, ignore_index: as in ``torch.nn.CrossEntropyLoss``.

    With soft targets the number of masks depends on the scores, so each call waits for the GPU.

    Example:
        >>> SparseTopK(k=1)(torch.tensor([[0.5, 0.0]]), torch.tensor([0]))
        tensor(0.0625)

    Reference: Sander, Puigcerver, Djolonga, Peyre, Blondel. Fast, Differentiable and Sparse Top-k: a Convex Analysis
    Perspective. ICML 2023. For k = 1: Martins, Astudillo. From Softmax to Sparsemax. ICML 2016.
    """

    option_ranges: ClassVar = {"tau": "(0, inf)"}
    tuning_grid: ClassVar = {"tau": (0.3, 1.0, 3.0)}

    def __init__(
        self,
        k: int = 5,
        *,
        tau: float = 1.0,
        weight: Tensor | Sequence[float] | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
    ) -> None:
        super().__init__(
            k, weight=weight, reduction=reduction, label_smoothing=label_smoothing, ignore_index=ignore_index
        )
        if not 0.0 < tau < math.inf:
            raise ValueError(f"tau must be positive and finite, got {tau!r}")
        self.tau = float(tau)

    def per_label(self, logits: Tensor, label: Tensor) -> Tensor:
        x = logits.double() / self.tau
        return (self.tau * _gain(x, label, self.k)).to(logits.dtype)

    def per_class(self, logits: Tensor) -> Tensor:
        x = logits.double() / self.tau
        mask, theta = topk_mask(x, self.k)
        rest = topk_mask(x, self.k - 1)[0] if self.k > 1 else torch.zeros_like(x)
        # a class outside the smaller mask can be left out of it without a change
        best, held = _value(x, mask, theta), x - theta - 0.5 + _value(x, rest, theta)
        table = torch.where(mask < 1, best - held, 0.0)
        rows, classes = ((rest > 0) & (mask < 1)).nonzero(as_tuple=True)
        if len(rows):
            # without one class, the mask of k - 1 stays within that of k: its support is all that it needs
            where = x.topk(int((mask > 0).sum(-1).max()), dim=-1).indices
            place = (where[rows] == classes[:, None]).int().argmax(-1)
            table = table.index_put((rows, classes), _gain(x.gather(1, where)[rows], place, self.k))
        return (self.tau * table).to(logits.dtype)

    def extra_repr(self) -> str:
        return f"tau={self.tau:g}, {super().extra_repr()}"


def _gain(x: Tensor, label: Tensor, k: int) -> Tensor:
    """Return the loss [B] of x [B, n] in units of tau."""
    mask, theta = topk_mask(x, k)
    held = x.gather(1, label[:, None]) - theta - 0.5
    if k > 1:
        place = torch.arange(x.shape[1] - 1, device=x.device)
        others = x.gather(1, place + (place >= label[:, None]))
        held = held + _value(others, topk_mask(others, k - 1)[0], theta)
    return (_value(x, mask, theta) - held)[:, 0]


def _value(x: Tensor, mask: Tensor, theta: Tensor) -> Tensor:
    """(x - theta) mu - |mu|^2 / 2 [B, 1]; the shift cancels between masks of one sum, and keeps numbers small."""
    return (torch.where(mask == 0, 0.0, (x - theta) * mask) - mask**2 / 2).sum(-1, keepdim=True)


def topk_mask(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """clip(x - theta, 0, 1) [B, n], which adds up to k, and theta [B, 1] without a gradient."""
    theta = _threshold(x.detach(), k)
    free = (x > theta) & (x < theta + 1)
    excess = (x - theta).clamp(0.0, 1.0).sum(-1, keepdim=True) - k
    # a step of Newton's changes theta by rounding, and makes it a function of x
    moving = theta + excess / free.sum(-1, keepdim=True).clamp(min=1)
    return (x - moving).clamp(0.0, 1.0), theta


def _threshold(x: Tensor, k: int) -> Tensor:
    """Return theta [B, 1], where the mask adds up to k.

    As theta falls, class i enters at x_i and is in entirely at x_i - 1. Between these points the sum is linear in
    theta, so theta follows from the points in descending order.
    """
    points, order = torch.cat((x, x - 1), 1).sort(-1, descending=True)
    active = torch.where(order < x.shape[1], 1.0, -1.0).to(x.dtype).cumsum(-1)
    rises = active[:, :-1] * (points[:, :-1] - points[:, 1:])
    sums = torch.cat((torch.zeros_like(points[:, :1]), rises.cumsum(-1)), 1)
    last = ((sums < k).sum(-1, keepdim=True) - 1).clamp(min=0)  # a row of NaN has none
    return points.gather(1, last) - (k - sums.gather(1, last)) / active.gather(1, last)
