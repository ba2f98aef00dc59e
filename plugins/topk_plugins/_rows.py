"""Functions of rows of scores that several losses share."""

import torch
from torch import Tensor


def wide(scores: Tensor) -> Tensor:
    """Return scores in at least single precision."""
    return scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores


def at_labels(table: Tensor, labels: Tensor) -> Tensor:
    """Return the entries [B] of a table [B, n] at labels [B]."""
    return table.gather(1, labels[:, None])[:, 0]


def nan_if_invalid(losses: Tensor, scores: Tensor) -> Tensor:
    """Set losses and gradients of rows with a NaN score to NaN: comparisons and sorts would lose it.

    Losses are [B], or a table [B, n]. A product with 0 or 1 would not do: a score of another row may be -inf.
    """
    broken = scores.isnan().any(-1, keepdim=True)
    nothing = torch.where(broken, scores, 0.0) * torch.where(broken, torch.nan, 0.0).to(scores.dtype)
    return losses + nothing.sum(-1, keepdim=losses.ndim > 1).to(losses.dtype)


def one_minus_p(nll: Tensor) -> Tensor:
    """Return 1 - p from -log p; at least the smallest normal number, so that powers and logarithms have a slope."""
    return (-torch.expm1(-nll)).clamp(min=torch.finfo(nll.dtype).tiny)
