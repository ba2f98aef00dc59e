"""The losses of a target from a table of losses."""

import torch
from torch import Tensor


def wide(scores: Tensor) -> Tensor:
    """Scores in at least single precision."""
    return scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores


def nan_where_broken(losses: Tensor, scores: Tensor) -> Tensor:
    """Set losses and gradients of rows with a NaN score to NaN: comparisons and sorts would lose it.

    Losses are [B], or a table [B, n]. A product with 0 or 1 would not do: a score of another row may be -inf.
    """
    broken = scores.isnan().any(-1, keepdim=True)
    nothing = torch.where(broken, scores, 0.0) * torch.where(broken, torch.nan, 0.0).to(scores.dtype)
    added = nothing.sum(-1, keepdim=losses.ndim > 1)
    return losses + added.to(losses.dtype)


def of_table(table: Tensor, target: Tensor | None) -> Tensor:
    """The losses of a target from the table L(s, c) [B, n]."""
    if target is None:
        return table
    if not target.is_floating_point():
        return table.gather(1, target[:, None])[:, 0]
    return expected(target, table)


def expected(q: Tensor, table: Tensor) -> Tensor:
    """Sum masses times losses [..., n] over the classes; a class without mass costs nothing, whatever its loss is."""
    # 0 * inf is NaN: a class of no mass costs nothing, but what it would cost is the gradient to its mass
    return (q * table.masked_fill((q == 0) & ~table.isfinite(), 0.0)).sum(-1)
