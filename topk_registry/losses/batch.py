"""Base class of losses that are defined on a whole batch, for example the mean size of prediction sets."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from topk_registry.losses.adjustable import Adjustable
from topk_registry.losses.base import has_autocast
from topk_registry.ops.distributed import Group, all_gather, gather_rows, number_of_ranks, outside_graphs
from topk_registry.ops.masses import LabelMixture, check_batch

__all__ = ["BatchLoss"]


class BatchLoss(Adjustable):
    """Base class of losses over a whole batch, called as ``loss(logits [B, n], label [B])``. The result is a scalar.

    Such a loss is not a mean over rows, so there is no option ``reduction``. The target must be class indices, one per
    row. A distribution or a :class:`LabelMixture` raises a ValueError. A subclass defines :meth:`of_batch`.

    After a call of :meth:`over_ranks`, the loss covers the rows of all ranks of a process group. For this purpose,
    :meth:`of_batch` must call :meth:`all_rows`, which takes a tensor of this rank and returns the rows of all ranks.

    Args:
        ignore_index: a row with this label does not affect the loss.

    Example:
        >>> class Spread(BatchLoss):
        ...     def of_batch(self, logits, label, counted):
        ...         logit = self.all_rows(logits.gather(1, label[:, None])[:, 0])
        ...         return logit.max() - logit.min()
        >>> Spread()(torch.eye(3) * torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 1, 2]))
        tensor(3.)
    """

    least_rows = 2  # with fewer rows, the loss raises a ValueError
    estimates_gradient = False  # True if the backward pass returns an estimate instead of the exact gradient
    _group: Group = None
    _over_ranks = False
    _spread = False  # whether the current call gathers rows from other ranks

    def __init__(self, *, ignore_index: int = -100) -> None:
        super().__init__()
        self.ignore_index = ignore_index

    def of_batch(self, logits: Tensor, label: Tensor, counted: Tensor) -> Tensor:
        """Return the loss of a batch, a scalar [].

        Args:
            logits: tensor [B, n] of this rank, in float32 or float64.
            label: class indices [B], each in [0, n).
            counted: bool [B], False for rows with the label ``ignore_index``. These rows have logits 0 and label 0.
        """
        raise TypeError(f"{type(self).__name__} must define of_batch(logits [B, n], label [B], counted [B]) -> []")

    def forward(self, logits: Tensor, target: Tensor | LabelMixture) -> Tensor:
        name = type(self).__name__
        if isinstance(target, LabelMixture) or (isinstance(target, Tensor) and target.is_floating_point()):
            raise ValueError(
                f"{name} needs one label per image [B], because it depends on the whole batch. Mixup, CutMix and other "
                "distributions over labels are not supported"
            )
        check_batch(logits, target, self.ignore_index)
        if len(logits) < self.least_rows:
            raise ValueError(f"{name} needs at least {self.least_rows} rows in a batch, got {len(logits)}")
        label = target.long()  # in uint8, an ignore_index of -100 would become 156
        counted = label != self.ignore_index
        self._spread = self._over_ranks and logits.requires_grad and number_of_ranks(self._group) > 1
        # otherwise, NaN in an ignored row would give NaN gradients in other rows
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).masked_fill(~counted[:, None], 0.0)
        kind, given = logits.device.type, (scores, label.masked_fill(~counted, 0), counted)
        if has_autocast(kind) and torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                return self.of_batch(*given)
        return self.of_batch(*given)

    if TYPE_CHECKING:  # torch annotates the return type as Any

        def __call__(self, logits: Tensor, target: Tensor | LabelMixture) -> Tensor: ...

    def over_ranks(self, group: Group = None) -> Any:
        """Make the loss cover the rows of all ranks, and return the same loss object.

        If the logits require a gradient, every rank returns the loss of the rows of all ranks. Otherwise, as in
        evaluation, each rank returns the loss of its own rows. If the gradients of the parameters are averaged over the
        ranks, as in ``DistributedDataParallel``, the average is the gradient of the loss of all rows.

        Args:
            group: process group of the ranks. Default: all ranks.
        """
        self._group, self._over_ranks = group, True
        return self

    def all_rows(self, x: Tensor) -> Tensor:
        """Concatenate ``x`` [B, ...] of all ranks, differentiably. If the loss covers only this rank, return ``x``."""
        return _gathered(x, self._group) if self._spread else x


@outside_graphs
def _gathered(x: Tensor, group: Group) -> Tensor:
    sizes = all_gather(torch.tensor([len(x)], device=x.device), group).flatten().tolist()
    return gather_rows(x, sizes, group)
