"""Tensor functions that several losses of this package use."""

import math

import torch
from torch import Tensor

from topk_registry.ops.backend import is_readable


def wide(scores: Tensor) -> Tensor:
    return scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores


def at_labels(table: Tensor, labels: Tensor) -> Tensor:
    return table.gather(1, labels[:, None])[:, 0]


def nan_if_invalid(losses: Tensor, scores: Tensor) -> Tensor:
    """Return the losses with NaN for each row with a logit NaN or +inf. The gradients of these rows are NaN too.

    The losses, [B] or [B, n] with one loss per possible label, were computed from ``scores`` [B, n]. Without this
    function, comparisons and sorts in a loss could hide such a logit. ``F.cross_entropy`` returns NaN for it too.
    """
    if is_readable(scores) and bool((scores.detach().sum(-1) < torch.inf).all()):
        return losses  # a row with NaN or +inf has such a sum, and a sum is faster to compute than the next lines
    broken = ~(scores < torch.inf).all(-1, keepdim=True)
    nothing = torch.where(broken, scores, 0.0) * torch.where(broken, torch.nan, 0.0).to(scores.dtype)
    return losses + nothing.sum(-1, keepdim=losses.ndim > 1).to(losses.dtype)


def without_highest(logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log p [B, n], the class with the largest logit [B, 1], p [B, n], and the log-odds of this class [B, 1].

    Here p = softmax(logits). The log-odds log p - log(1 - p) are precise even if p rounds to 1. Only the class with the
    largest logit can have p > 1/2. In the returned p, the entry of this class is a number near 0.
    """
    log_p = logits.log_softmax(1)
    finfo, (highest, index) = torch.finfo(log_p.dtype), log_p.detach().topk(2, dim=1)
    least = math.log(finfo.tiny) / 2  # a product of two smaller exponentials would be a slow denormal number
    # `second` is a scale that cancels, so it needs no gradient; the clamp avoids -inf - (-inf)
    top, second = index[:, :1], highest[:, 1:].clamp(min=finfo.min)
    others = (log_p - second).scatter_(1, top, least).clamp(min=least).exp()
    log_odds = log_p.gather(1, top) - second - others.sum(1, keepdim=True).log()
    return log_p, top, others * second.clamp(min=least).exp(), log_odds


def softmax_log_odds(logits: Tensor) -> Tensor:
    """Return log p - log(1 - p) [B, n] for p = softmax(logits). The result is precise even if p rounds to 1."""
    log_p, top, p, log_odds = without_highest(logits)
    return (log_p - (1 - p).log()).scatter_(1, top, log_odds)
