"""LapSum's loss in torch operations, in double precision; see README.md."""

import math

import torch
from torch import Tensor

from topk_registry.ops.laplace import laplace_threshold
from topk_registry.ops.targets.table import of_table, wide

REACH = 600.0  # e^600 is a double; where b is no integer rank, it lies within log(n / |k - m|) of a score


def lapsum(k: float, tau: float, scores: Tensor, target: Tensor | None) -> Tensor:
    """The losses of :func:`topk_registry.ops.lapsum.api.lapsum_rows`."""
    s = wide(scores)
    x = s.double() / tau
    b = threshold(x, k)
    if target is None or target.is_floating_point():
        return of_table(-_log_chance(x - b[:, None]).to(s.dtype), target)
    return -_log_chance(x.gather(1, target[:, None])[:, 0] - b).to(s.dtype)


def threshold(x: Tensor, k: float) -> Tensor:
    """b [B] with sum_i F(x_i - b) = k of rows x [B, n]; twice differentiable where no score equals b."""
    b = laplace_threshold(x, k)
    # Newton's steps change b by rounding, and give it its derivatives: one step the first, two steps the second
    return _step(x, _step(x, b, k), k)


def _step(x: Tensor, b: Tensor, k: float) -> Tensor:
    """One step of Newton's method for sum_i F(x_i - b) = k, with tails relative to the largest."""
    above = (x > b[:, None]).detach()
    distance = torch.where(above, x - b[:, None], b[:, None] - x)  # the derivative of abs() is 0 where a score equals b
    nearest = distance.detach().amin(-1, keepdim=True)
    tails = 0.5 * (nearest - distance).exp()
    excess = above.sum(-1).to(x.dtype) - k
    whole = torch.where(excess == 0, 0.0, excess * nearest[:, 0].clamp(max=REACH).exp())
    return b + (whole + torch.where(above, -tails, tails).sum(-1)) / tails.sum(-1)


def _log_chance(u: Tensor) -> Tensor:
    """log F(u), exact in both tails."""
    right = torch.log1p(-0.5 * (-u.clamp(min=0.0)).exp())
    return torch.where(u > 0, right, u - math.log(2))
