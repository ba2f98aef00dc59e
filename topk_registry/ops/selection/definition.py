"""Hinges on the k-th best rival of a label, in torch operations.

The k-th best rival of c is s_[k+1] for the k classes on top and s_[k] for all others. Ties are broken by ``topk``'s
choice of classes, so that a gradient reaches one class only.
"""

import math

import torch
from torch import Tensor

from topk_registry.ops.targets.table import nan_where_broken, of_table, wide


def hinge(against: str, k: int, alpha: float | Tensor, factor: float, scores: Tensor, target: Tensor | None) -> Tensor:
    """The losses of :func:`topk_registry.ops.selection.api.topk_hinge_rows`."""
    s = wide(scores)
    label = None if target is None or target.is_floating_point() else target
    if against == "mean":
        losses = _convex(s, k) if label is None else _convex_at(s, label, k)
    else:
        losses = _hinge(s, label, against, k, alpha.to(s) if isinstance(alpha, Tensor) else alpha, factor)
    losses = nan_where_broken(losses, s)  # a hinge alone has no gradient at NaN
    return of_table(losses, target) if label is None else losses


def _hinge(s: Tensor, label: Tensor | None, against: str, k: int, alpha: float | Tensor, factor: float) -> Tensor:
    """The losses [B] of labels, or the table [B, n] of None."""
    threshold = ranked(s, k)[0][:, -1:] if against == "rank" else None
    if label is None:
        lead = (best_rival(s, k) if threshold is None else threshold) - s
        return (factor * lead + alpha).clamp(min=0)
    lead = gap(s, label, k) if threshold is None else (threshold - s.gather(1, label[:, None]))[:, 0]
    return (factor * lead + (alpha[label] if isinstance(alpha, Tensor) else alpha)).clamp(min=0)


def _convex(s: Tensor, k: int) -> Tensor:
    top, index = ranked(s, k)
    is_top = torch.zeros_like(s, dtype=torch.bool).scatter(1, index[:, :-1], True)
    better = torch.where(is_top, top[:, :k].sum(1, True) - s, top[:, : k - 1].sum(1, True))
    last = torch.where(is_top, top[:, -1:], top[:, -2:-1])
    return _convex_hinge(better, last, s, k)


def _convex_at(s: Tensor, label: Tensor, k: int) -> Tensor:
    rivals = s.scatter(1, label[:, None], -math.inf).topk(k, dim=1).values  # [B, k]
    return _convex_hinge(rivals[:, :-1].sum(1), rivals[:, -1], s.gather(1, label[:, None])[:, 0], k)


def _convex_hinge(better: Tensor, last: Tensor, score: Tensor, k: int) -> Tensor:
    """The loss from the sum of the k - 1 best rivals, the k-th rival and the label's score."""
    return ((better + k - 1 + torch.maximum(last + 1, score)) / k - score).clamp(min=0)


def ranked(s: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k + 1 largest scores and their classes, both [B, k+1]; all NaN in a row with a NaN, which ``topk`` puts first
    and the scores after it would hide."""
    top, index = s.topk(k + 1, dim=1)
    return torch.where(top[:, :1].isnan(), torch.nan, top), index


def best_rival(s: Tensor, k: int) -> Tensor:
    """(s without c)_[k] for every class c [B, n]."""
    top, index = ranked(s, k)
    is_top = torch.zeros_like(s, dtype=torch.bool).scatter(1, index[:, :k], True)
    return torch.where(is_top, top[:, k:], top[:, k - 1 : k])


def gap(s: Tensor, label: Tensor, k: int) -> Tensor:
    """(s without y)_[k] - s_y [B]. Both scores are gathered at once, for one gradient of the size of the scores."""
    top, index = ranked(s.detach(), k)
    is_top = (index[:, :k] == label[:, None]).any(1)
    rival = torch.where(is_top, index[:, k], index[:, k - 1])
    both = s.gather(1, torch.stack([rival, label], 1))  # [B, 2]
    return torch.where(top[:, 0].isnan(), torch.nan, both[:, 0] - both[:, 1])
