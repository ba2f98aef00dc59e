"""Base class of losses that are defined on a whole batch, such as the size of prediction sets.

The loss of one row depends on the other rows. Therefore these losses have no ``reduction`` and return no loss per row.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from topk_registry.losses.base import has_autocast
from topk_registry.losses.options import Adjustable, index
from topk_registry.losses.ranks import number_of_ranks
from topk_registry.losses.targets import LabelMixture, check_logits, check_target, check_tensor
from topk_registry.ops.distributed import Group, all_gather, gather_rows, outside_graphs

__all__ = ["BatchLoss"]


class BatchLoss(Adjustable):
    """Base of losses over ``(logits [B, n], label [B])`` whose rows depend on each other.

    A subclass defines :meth:`of_batch`. The loss needs one label per row, so a distribution or a :class:`LabelMixture`
    as the target raises an error. Logits in half precision are converted to float32.

    After :meth:`over_ranks`, the batch consists of the rows of all ranks of a process group. A subclass passes each
    tensor that must cover the whole batch through :meth:`all_rows`.

    Args:
        ignore_index: rows with this label do not affect the loss.

    Example:
        >>> class Spread(BatchLoss):
        ...     def of_batch(self, logits, label, counted):
        ...         score = self.all_rows(logits.gather(1, label[:, None])[:, 0])
        ...         return score.max() - score.min()
        >>> Spread()(torch.eye(3) * torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 1, 2]))
        tensor(3.)
    """

    least_rows = 2
    estimates_gradient = False  # True: backward returns a low-variance estimate of the gradient
    _group: Group = None
    _over_ranks = False
    _spread = False  # whether the current call gathers rows from other ranks

    def __init__(self, *, ignore_index: int = -100) -> None:
        super().__init__()
        self.ignore_index: int = index(ignore_index)

    def of_batch(self, logits: Tensor, label: Tensor, counted: Tensor) -> Tensor:
        """Return the loss [] of a batch.

        Args:
            logits: [B, n], in at least single precision; 0 in ignored rows.
            label: [B], within range; 0 in ignored rows.
            counted: [B], False for ignored rows.
        """
        raise TypeError(f"{type(self).__name__} must define of_batch(logits [B, n], label [B], counted [B]) -> []")

    def forward(self, logits: Tensor, target: Tensor | LabelMixture) -> Tensor:
        name = type(self).__name__
        if not isinstance(target, LabelMixture):
            check_tensor(target, "target")
        if isinstance(target, LabelMixture) or target.is_floating_point():
            raise ValueError(
                f"{name} needs one label per image [B], because it depends on the whole batch. Mixup, CutMix and other "
                "distributions over labels are not supported"
            )
        check_logits(logits)
        check_target(logits, target, self.ignore_index)
        if len(logits) < self.least_rows:
            raise ValueError(f"{name} needs at least {self.least_rows} rows in a batch, got {len(logits)}")
        label, counted = target.long(), target != self.ignore_index
        self._spread = self._over_ranks and logits.requires_grad and number_of_ranks(self._group) > 1
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).masked_fill(
            ~counted[:, None], 0.0
        )  # otherwise NaN in ignored rows would reach other gradients
        kind, given = logits.device.type, (scores, label.masked_fill(~counted, 0), counted)
        if has_autocast(kind) and torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                return self.of_batch(*given)
        return self.of_batch(*given)

    if TYPE_CHECKING:  # torch annotates the return type as Any

        def __call__(self, logits: Tensor, target: Tensor | LabelMixture) -> Tensor: ...

    def over_ranks(self, group: Group = None) -> Any:
        """Compute the loss over the rows of all ranks, for use with gradients that are averaged over the ranks.

        With gradients, every rank then returns the loss of all rows. Without gradients, as in evaluation, each rank
        returns the loss of its own rows.

        Args:
            group: process group whose ranks average gradients. Default: all ranks.

        Returns:
            The same loss.
        """
        self._group, self._over_ranks = group, True
        return self

    def all_rows(self, x: Tensor) -> Tensor:
        """Return ``x`` [B, ...] of all ranks after :meth:`over_ranks`, else ``x`` of this rank. Differentiable."""
        return _gathered(x, self._group) if self._spread else x


@outside_graphs
def _gathered(x: Tensor, group: Group) -> Tensor:
    sizes = all_gather(torch.tensor([len(x)], device=x.device), group).flatten().tolist()
    return gather_rows(x, sizes, group)
