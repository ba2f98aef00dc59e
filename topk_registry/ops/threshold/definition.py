"""The loss over sigmoids with one threshold a row in torch operations, in double precision; see README.md."""

import torch
from torch import Tensor
from torch.nn import functional as F

from topk_registry.ops.laplace import laplace_threshold
from topk_registry.ops.targets.table import of_table, wide

REACH = 600.0  # e^600 is a double; where k is no whole number, b lies within log(n / |k - m|) of a score
STEPS = 5  # from log 2 to below a double's rounding, by equation 6


def soft_topk(k: float, tau: float, scores: Tensor, target: Tensor | None) -> Tensor:
    """The losses of :func:`topk_registry.ops.threshold.api.soft_topk_rows`."""
    s = wide(scores)
    x = s.double() / tau
    b = threshold(x, k)
    if target is None or target.is_floating_point():
        return of_table(F.softplus(b[:, None] - x, threshold=40.0).to(s.dtype), target)
    return F.softplus(b - x.gather(1, target[:, None])[:, 0], threshold=40.0).to(s.dtype)


def threshold(x: Tensor, k: float) -> Tensor:
    """b [B] with sum_i sigmoid(x_i - b) = k of rows x [B, n]; NaN where no more than k scores are above -inf.

    It is twice differentiable: a step of Newton's method at the solution gives the first derivative, two the second.
    """
    b = laplace_threshold(x, k)  # within log 2 of it, by equation 5
    b = torch.where((x > -torch.inf).sum(-1) > k, b, torch.nan)
    for _ in range(STEPS):
        b = _step(x.detach(), b, k)
    return _step(x, _step(x, b, k), k)


def _step(x: Tensor, b: Tensor, k: float) -> Tensor:
    """One step of Newton's method, by equation 3 with tails relative to the largest."""
    above = (x > b[:, None]).detach()
    distance = torch.where(above, x - b[:, None], b[:, None] - x)  # the derivative of abs() is 0 where a score equals b
    nearest = distance.detach().amin(-1, keepdim=True)
    small = (-distance).exp()
    tails = (nearest - distance).exp() / (1 + small)
    excess = above.sum(-1).to(x.dtype) - k
    whole = torch.where(excess == 0, 0.0, excess * nearest[:, 0].clamp(max=REACH).exp())
    return b + (whole + torch.where(above, -tails, tails).sum(-1)) / (tails / (1 + small)).sum(-1)
