"""Mean of a loss over the rows of all ranks, when each rank has a part of the batch.

DistributedDataParallel and FSDP average the gradients of R ranks. Let S_r be the sum of the weighted losses of rank r,
and let W_r be the sum of the weights of the rows of rank r. The mean over all rows is M = sum_r S_r / sum_r W_r. Rank r
returns R S_r / sum_q W_q, because the average of these numbers over the ranks is M.
"""

from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from topk_registry.losses.base import ClassificationLoss
from topk_registry.losses.targets import LabelMixture, Target
from topk_registry.ops.distributed import Group, all_reduce, outside_graphs

L = TypeVar("L", bound=ClassificationLoss)


def mean_over_ranks(loss: L, group: Group = None) -> L:
    """Make the mean of a loss cover the rows of all ranks. The loss is changed in place and returned.

    A mean divides by the sum of the weights of the rows. With class weights or ignored rows, this divisor differs
    between ranks. Then the average of the means of the ranks is not the mean over all rows. After a call of this
    function, each rank divides by the average of all ranks' divisors, so the ranks exchange one number per call of the
    loss. If the loss requires no gradient, as in evaluation, each rank returns the mean over its own rows instead.

    Args:
        loss: must have ``reduction="mean"``. The reduction becomes ``"sum"``, and a forward hook divides the sum.
        group: process group of the ranks. Default: all ranks.

    Example:
        >>> from topk_registry import create_loss
        >>> loss = mean_over_ranks(create_loss("focal", weight=[1.0, 2.0]))
        >>> loss(torch.zeros(2, 2), torch.tensor([0, 1]))
        tensor(0.1733)
    """
    if not isinstance(loss, ClassificationLoss):
        raise TypeError(f"loss must be a ClassificationLoss, got {type(loss).__name__}")
    if loss.reduction != "mean":
        raise ValueError(f"the loss's reduction must be 'mean', got {loss.reduction!r}")
    loss.reduction = "sum"
    loss.register_forward_hook(partial(_divided, group), with_kwargs=True)
    return loss


def weight_of_rows(loss: ClassificationLoss, target: Target, sample_weight: Tensor | None = None) -> Tensor:
    """Return the divisor [] of the mean over the rows of this rank: the sum of the weights of the rows, in float64."""
    if isinstance(target, LabelMixture) or target.is_floating_point():
        table = target.labels if isinstance(target, LabelMixture) else target
        rows = torch.ones_like(table.select(min(1, table.ndim - 1), 0), dtype=torch.float64)
    else:
        counts = target.long() != loss.ignore_index  # in uint8, an ignore_index of -100 would become 156
        rows = counts.double()
        if (weight := loss.class_weight) is not None:
            rows = rows * weight.to(rows)[target.long().masked_fill(~counts, 0)]
    return (rows if sample_weight is None else rows * sample_weight.to(rows)).sum()


def number_of_ranks(group: Group = None) -> int:
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


@outside_graphs
def sum_over_ranks(weight: Tensor, group: Group = None) -> Tensor:
    """Return the sum of ``weight`` [] over the ranks of a group, or over all ranks if ``group`` is None."""
    return weight if number_of_ranks(group) == 1 else all_reduce(weight.detach().clone(), group)


def _divided(group: Group, loss: ClassificationLoss, args: tuple, kwargs: dict, total: Tensor) -> Tensor:
    given = dict(zip(("logits", "target", "sample_weight"), args, strict=False)) | kwargs
    weight = weight_of_rows(loss, given["target"], given.get("sample_weight")).to(total)
    if total.requires_grad:
        weight = sum_over_ranks(weight, group) / number_of_ranks(group)
    return total / weight
