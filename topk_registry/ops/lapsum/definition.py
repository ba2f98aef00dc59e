"""LapSum's loss in torch operations, in double precision; see README.md."""

import math

import torch
from torch import Tensor

from topk_registry.ops.targets.table import of_table, wide

REACH = 600.0  # e^600 is a double; where b is no integer rank, it lies within log(n / |k - m|) of a score


def lapsum(k: float, tau: float, scores: Tensor, target: Tensor | None) -> Tensor:
    """The losses of :func:`topk_registry.ops.lapsum.api.lapsum_loss`."""
    s = wide(scores)
    x = s.double() / tau
    b = threshold(x, k)
    if target is None or target.is_floating_point():
        return of_table(-_log_chance(x - b[:, None]).to(s.dtype), target)
    return -_log_chance(x.gather(1, target[:, None])[:, 0] - b).to(s.dtype)


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
