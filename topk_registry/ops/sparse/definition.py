"""The loss over sparse top-k masks in torch operations, in double precision; see README.md."""

import torch
from torch import Tensor

from topk_registry.ops.targets.table import nan_where_broken, of_table, wide
from topk_registry.ops.tensors import is_hidden


def sparse_topk(k: int, tau: float, scores: Tensor, target: Tensor | None) -> Tensor:
    """The losses of :func:`topk_registry.ops.sparse.api.sparse_topk_rows`."""
    s = wide(scores)
    x = s.double() / tau
    if target is None or target.is_floating_point():
        return of_table(nan_where_broken((tau * _gains(x, k)).to(s.dtype), s), target)
    return nan_where_broken((tau * _gain(x, target, k)).to(s.dtype), s)


def _gains(x: Tensor, k: int) -> Tensor:
    """The losses [B, n] of every class in units of tau."""
    if is_hidden(x):  # the classes that need a mask of their own cannot be told from the others: each gets one
        B, n = x.shape
        label = torch.arange(n, device=x.device).repeat(B)
        return _gain(x.repeat_interleave(n, 0), label, k).view(B, n)
    mask, theta = topk_mask(x, k)
    rest = topk_mask(x, k - 1)[0] if k > 1 else torch.zeros_like(x)
    # a class outside the smaller mask can be left out of it without a change
    best, held = _value(x, mask, theta), x - theta - 0.5 + _value(x, rest, theta)
    table = torch.where(mask < 1, best - held, 0.0)
    rows, classes = ((rest > 0) & (mask < 1)).nonzero(as_tuple=True)
    if len(rows):
        # without one class, the mask of k - 1 stays within that of k: its support is all that it needs
        where = x.topk(int((mask > 0).sum(-1).max()), dim=-1).indices
        place = (where[rows] == classes[:, None]).int().argmax(-1)
        table = table.index_put((rows, classes), _gain(x.gather(1, where)[rows], place, k))
    return table


def _gain(x: Tensor, label: Tensor, k: int) -> Tensor:
    """The loss [B] of x [B, n] in units of tau."""
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
    fixed = (x - theta).detach().clamp(0.0, 1.0)  # without a gradient, also where a score is at the threshold itself
    excess = torch.where(free, x - theta, fixed).sum(-1, keepdim=True) - k
    # a step of Newton's changes theta by rounding, and makes it a function of x
    moving = theta + excess / free.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(free, x - moving, fixed), theta


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
