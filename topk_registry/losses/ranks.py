"""Mean of a loss over the rows of all processes, when each process has a part of the batch.

DistributedDataParallel and FSDP average the gradients of R processes. Let S_r be the sum of the weighted losses of
process r, and W_r the sum of its weights. The mean over all rows is sum_r S_r / sum_r W_r. If process r returns
R S_r / sum_q W_q, the average over processes is this mean.
"""

from typing import TypeVar

from torch import Tensor
from torch import distributed as dist

from topk_registry.losses.base import ClassificationLoss
from topk_registry.losses.targets import LabelMixture, Target
from topk_registry.ops.distributed import Group, all_reduce, outside_graphs

L = TypeVar("L", bound=ClassificationLoss)


def mean_over_ranks(loss: L, group: Group = None) -> L:
    """Make a loss return the mean over the rows of all ranks, for use with gradients that are averaged over the ranks.

    In one process, a mean with class weights or ignored rows divides by the sum of the weights of the batch. With
    ``DistributedDataParallel`` or ``fully_shard``, each rank would divide by the weights of its own rows only. After
    this call, the average of the returned losses over the ranks is the mean over all rows. In each call with gradients,
    the ranks exchange one number. Without gradients, as in evaluation, each rank returns the mean over its own rows.

    Args:
        loss: with ``reduction="mean"``, changed in place: the reduction becomes ``"sum"``, and a hook divides the sum.
        group: process group whose ranks average gradients. Default: all ranks.

    Returns:
        The same loss.

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
    loss.register_forward_hook(_Mean(group), with_kwargs=True)
    return loss


def weight_of_rows(loss: ClassificationLoss, target: Target, sample_weight: Tensor | None = None) -> Tensor:
    """Return the sum [] of the weights of the rows of this process, in double precision: the divisor of the mean."""
    if isinstance(target, LabelMixture):
        rows = target.labels[:, 0].double().fill_(1.0)
    elif target.is_floating_point():
        rows = target.select(min(1, target.ndim - 1), 0).double().mul(0.0).nan_to_num(0.0) + 1.0
    else:
        counts = target != loss.ignore_index
        rows = counts.double()
        if (weight := loss.class_weight) is not None:
            rows = rows * weight.to(rows)[target.long().masked_fill(~counts, 0)]
    return (rows if sample_weight is None else rows * sample_weight.to(rows)).sum()


def weighs_rows(loss: object) -> bool:
    """Return whether the loss is a mean over rows that may have different weights."""
    return isinstance(loss, ClassificationLoss) and loss.reduction == "mean" and loss.class_weight is not None


def number_of_ranks(group: Group = None) -> int:
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


@outside_graphs
def sum_over_ranks(weight: Tensor, group: Group = None) -> Tensor:
    """Return the sum of a number [] over the ranks of a group. Default: all ranks."""
    if number_of_ranks(group) == 1:
        return weight
    weight = weight.detach().clone()
    return all_reduce(weight, group)


class _Mean:
    """Forward hook that divides a summed loss by the sum of the weights of all ranks."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def __call__(self, loss: ClassificationLoss, args: tuple, kwargs: dict, total: Tensor) -> Tensor:
        target = args[1] if len(args) > 1 else kwargs["target"]
        sample_weight = args[2] if len(args) > 2 else kwargs.get("sample_weight")
        weight = weight_of_rows(loss, target, sample_weight).to(total)
        if total.requires_grad:
            weight = sum_over_ranks(weight, self.group) / number_of_ranks(self.group)
        return total / weight
