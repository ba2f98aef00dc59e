"""Mean of a loss over the rows of all ranks, when each rank has a part of the batch.

DistributedDataParallel and FSDP average the gradients of R ranks. Let S_r be the sum of the weighted losses of rank r,
and let W_r be the sum of the weights of the rows of rank r. The mean over all rows is M = sum_r S_r / sum_r W_r. Rank r
returns R S_r / sum_q W_q, because the average of these numbers over the ranks is M.
"""

from functools import partial
from typing import TypeVar

from topk_registry.losses.base import ClassificationLoss
from topk_registry.ops.distributed import Group, mean_of_ranks

L = TypeVar("L", bound=ClassificationLoss)


def mean_over_ranks(loss: L, group: Group = None) -> L:
    """Make the mean of a loss cover the rows of all ranks. The loss is changed in place and returned.

    A mean divides by the sum of the weights of the rows. With class weights or ignored rows, this divisor differs
    between ranks. Then the average of the means of the ranks is not the mean over all rows. After a call of this
    function, each rank divides by the average of all ranks' divisors, so the ranks exchange one number per call of the
    loss. In evaluation, each rank returns the mean over its own rows, and the ranks exchange nothing: if the logits
    require no gradient, or after ``loss.eval()``.

    Args:
        loss: must have ``reduction="mean"``.
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
    loss._average = partial(mean_of_ranks, group=group)
    return loss
