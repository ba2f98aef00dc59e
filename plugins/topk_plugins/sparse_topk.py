r"""Sparse top-k: the hard top-k mask, smoothed by a quadratic term such that it stays sparse.

    mask(x, k) = argmax_mu  x mu - |mu|^2 / 2  over 0 <= mu <= 1, sum mu = k  =  clip(x - theta, 0, 1),  x = s / tau

is the top-k mask of Sander et al. for p = 2. The loss is the value of this maximum minus the maximum over masks with
mu_y = 1. For k = 1, this is the sparsemax loss.
"""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import Unpack

from topk_plugins._rows import nan_if_invalid
from topk_registry import CommonOptions, TopKLoss
from topk_registry.options import number


class SparseTopK(TopKLoss):
    r"""Value of the best sparse mask minus the value of the best mask that contains the label.

    .. math:: L(s, y) = \tau \Bigl(\max_{\mu} \Omega(\mu) - \max_{\mu: \mu_y = 1} \Omega(\mu)\Bigr), \qquad
        \Omega(\mu) = \frac{s^\top \mu}{\tau} - \frac12 \|\mu\|^2

    over :math:`0 \le \mu \le 1, \sum_i \mu_i = k`. The mask is the mask of the paper for p = 2. The loss on this mask
    is a construction of this package. If the score of the label exceeds the (k+1)-th largest score by tau, then
    :math:`\mu_y = 1` in the best mask, and the loss is 0. A gradient is the difference of two masks, so it is sparse.

    Use when:
        Gradients should be exactly zero for classes that do not compete for the k places. No study here has evaluated
        the loss.

    Avoid when:
        Speed matters: each row solves small problems in double precision. ``topk_nll`` is the dense counterpart.

    Args:
        k: size of the set that should contain the label, 1 <= k <= n - 1.
        tau: strength of the quadratic term, positive. As tau goes to 0, the mask becomes the hard top-k.
        common: weight, reduction, label_smoothing, ignore_index, as in ``torch.nn.CrossEntropyLoss``.

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
        **common: Unpack[CommonOptions],
    ) -> None:
        super().__init__(k, **common)
        self.tau = number(tau, "tau", above=0)

    def per_label(self, logits: Tensor, labels: Tensor) -> Tensor:
        s, x = self._relative(logits)
        return nan_if_invalid((self.tau * _gain(x, labels, self.k)).to(s.dtype), s)

    def per_class(self, logits: Tensor) -> Tensor:
        s, x = self._relative(logits)
        return nan_if_invalid((self.tau * _gains(x, self.k)).to(s.dtype), s)

    def _relative(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores, and x = s / tau in double precision minus its k-th largest entry."""
        s = torch.where(logits == torch.inf, torch.nan, logits)
        x = s.double() / self.tau
        # scores more than 2 above the k-th largest have mu = 1 in every mask and cancel
        return s, (x - x.detach().topk(self.k, dim=-1).values[:, -1:]).clamp(max=2)

    def extra_repr(self) -> str:
        return f"tau={self.tau:g}, {super().extra_repr()}"


def _gains(x: Tensor, k: int) -> Tensor:
    mask, theta = topk_mask(x, k)
    u = x - theta
    own = torch.where(u > 0, (1 - mask) ** 2 / 2, 0.5 - u)
    half = torch.where(mask < 1, mask**2 / 2, u - 0.5)
    if k == 1:  # the other classes have a mask of size 0
        return torch.where(mask < 1, own + (half.sum(-1, keepdim=True) - half), 0.0)

    falling, order = u.detach().sort(-1, descending=True)
    # thresholds are in [0, 1]: for every label, scores below 0 have mu = 0 and scores above 2 have mu = 1
    ends = _threshold_of_others(u.detach().clamp(-1, 2), k - 1).clamp(0, 1)
    first = torch.searchsorted(-falling, -(1 + ends), right=True)  # number of classes with mu = 1
    last = torch.searchsorted(-falling, -ends)  # number of classes with mu > 0
    in_window = (u > ends) & (u < 1 + ends)

    def of_window(each: Tensor) -> Tensor:
        sums = F.pad(each.gather(1, order).cumsum(-1), (1, 0))
        return sums.gather(1, last) - sums.gather(1, first)

    size = (last - first - in_window.long()).to(x.dtype)
    total = of_window(u.clamp(0, 2)) - torch.where(in_window, mask, 0.0)
    delta = torch.where(size > 0, (total + first - (k - 1)) / size.clamp(min=1), ends)
    below = F.pad(half.gather(1, order).flip(-1).cumsum(-1).flip(-1), (0, 1)).gather(1, last)
    below = below - torch.where(in_window, 0.0, half)
    others = below + size * delta**2 / 2 - of_window((u.clamp(1, 2) - 1) ** 2 / 2)
    return torch.where(mask < 1, own + others, 0.0)


def _gain(x: Tensor, label: Tensor, k: int) -> Tensor:
    mask, theta = topk_mask(x, k)
    theta = theta.detach()  # cancels, because all masks have the same sum
    held = x.gather(1, label[:, None]) - theta - 0.5
    if k > 1:
        place = torch.arange(x.shape[1] - 1, device=x.device)
        others = x.gather(1, place + (place >= label[:, None]))
        held = held + _value(others, topk_mask(others, k - 1)[0], theta)
    return (_value(x, mask, theta) - held)[:, 0]


def _value(x: Tensor, mask: Tensor, theta: Tensor) -> Tensor:
    return (torch.where(mask == 0, 0.0, (x - theta) * mask) - mask**2 / 2).sum(-1, keepdim=True)


def topk_mask(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the mask clip(x - theta, 0, 1) [B, n], whose rows sum to k, and theta [B, 1]."""
    theta = _threshold(x.detach(), k)
    free = (x > theta) & (x < theta + 1)
    fixed = (x - theta).detach().clamp(0.0, 1.0)  # detached, also for a score equal to the threshold
    excess = torch.where(free, x - theta, fixed).sum(-1, keepdim=True) - k
    # a Newton step makes theta a differentiable function of x and changes it by rounding only
    moving = theta + excess / free.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(free, x - moving, fixed), moving


def _threshold(x: Tensor, k: int) -> Tensor:
    """Return the largest theta [B, 1] for which the mask sums to k."""
    last, next_one = x.topk(k + 1, dim=-1).values[:, -2:].split(1, dim=-1)
    points, active, sums = _line(torch.minimum(x, last + 1))  # larger scores have mu = 1 as well
    place = ((sums < k).sum(-1, keepdim=True) - 1).clamp(min=0)  # no such place in a row of NaN
    theta = points.gather(1, place) - (k - sums.gather(1, place)) / active.gather(1, place)
    return torch.where(last - next_one >= 1, last - 1, theta)


def _threshold_of_others(x: Tensor, k: int) -> Tensor:
    """Return for each class the threshold [B, n] at which the mask of all other classes sums to k."""
    points, active, sums = _line(x)
    count, place, step = points.shape[1], torch.zeros_like(x, dtype=torch.int64), 1
    while 2 * step < count:
        step *= 2
    while step:  # binary search for the last point at which the sum is below k
        after = (place + step).clamp(max=count - 1)
        without = sums.gather(1, after) - (x - points.gather(1, after)).clamp(0.0, 1.0)
        place = torch.where((place + step < count) & (without < k), after, place)
        step //= 2
    point = points.gather(1, place)
    without = sums.gather(1, place) - (x - point).clamp(0.0, 1.0)
    is_active = (x >= point) & (x - 1 < point)
    return point - (k - without) / (active.gather(1, place) - is_active.to(x.dtype)).clamp(min=1)


def _line(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of the mask as a piecewise linear function of theta.

    As theta decreases, class i enters the mask at x_i and reaches mu = 1 at x_i - 1.

    Returns:
        The points x_i and x_i - 1 [B, 2 n] in descending order, the slope of the sum below each point, and the sum at
        each point.
    """
    points, order = torch.cat((x, x - 1), 1).sort(-1, descending=True)
    active = torch.where(order < x.shape[1], 1.0, -1.0).to(x.dtype).cumsum(-1)
    rises = active[:, :-1] * (points[:, :-1] - points[:, 1:])
    return points, active, torch.cat((torch.zeros_like(points[:, :1]), rises.cumsum(-1)), 1)
