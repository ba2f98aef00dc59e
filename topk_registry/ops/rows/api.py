"""Losses of one row at a time: which kernel computes one, and the call that computes it with every option.

A row costs sum_c m_c L(s, c): labels, label smoothing, mixup and class weights are masses m_c. So one kernel a loss
serves them all, and writes the gradient while the row is in the cache.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from topk_registry.ops.backend import load, operator
from topk_registry.ops.rows.autograd import Reduced
from topk_registry.ops.rows.backends import Own
from topk_registry.ops.targets.checks import check_logits, check_target
from topk_registry.ops.targets.label_mixture import LabelMixture
from topk_registry.ops.targets.masses import BY_NAME, Options
from topk_registry.ops.targets.table import wide
from topk_registry.ops.tensors import readable


class Kernel(Protocol):
    """Kernel that computes a loss and its gradient in one call."""

    def run(self, own: Own, options: Options, scores: Tensor, wanted: bool) -> tuple[Tensor | None, ...]:
        """The losses or their sum or mean, and, if wanted, the gradient in a precision that holds it.

        ``own`` are the loss's tensors as they are at this call: a kernel keeps no number and no address of them. A
        third tensor of the result is a factor that the gradient has yet to be multiplied by.
        """
        ...


@dataclass(eq=False, slots=True)  # not frozen: one is made at each call, and freezing takes longer than all else
class RowLoss:
    """A loss of one row at a time: what it is, and the kernel that computes it.

    Args:
        definition: ``(scores [B, n], target) -> losses`` in torch operations. Of labels [B] the losses [B]; of masses
            [B, n] on the classes their sum_c m_c L(s, c) [B]; of None the table L(s, c) [B, n]. It serves where no
            kernel does: under transforms and compilation, on other devices, and for second derivatives.
        kernel: gives the kernel for the CPU, or None.
        on_gpu: gives the kernel for GPUs, or None.
        own: tensors of the loss that the kernels read, at each call as they are then.
        piecewise_linear: whether the gradient to the scores does not change where it exists. Second derivatives are
            then 0, and nothing is computed anew for them.
        operator: the name of the one whose backend serves. For ``"torch"`` the definition does.
        request: what that operator is asked for, beside the device and whether in double precision.
        in_double: whether all is computed in double precision, whatever that of the scores.
        least_classes: least number of classes that the kernels accept.
        more_than: the number of classes that a row must exceed, as a set of k classes needs more than k.
    """

    definition: Callable[[Tensor, Tensor | None], Tensor]
    kernel: Callable[[], Kernel | None] | None = None
    on_gpu: Callable[[], Kernel | None] | None = None
    own: Own = ()
    piecewise_linear: bool = False
    operator: str = "rows"
    request: tuple[Any, ...] = ()
    in_double: bool = False
    least_classes: int = 2
    more_than: float = 0

    def kernel_for(self, scores: Tensor) -> Callable[..., tuple[Tensor | None, ...]] | None:
        """Return the call ``(options, scores, wanted)`` of the kernel for these scores, see :class:`Kernel`.

        None where there is none, and where torch operations are to serve: the definition does then.
        """
        kernel_of = self.on_gpu if scores.is_cuda else self.kernel
        if kernel_of is None or scores.shape[1] < self.least_classes:
            return None
        in_double = self.in_double or scores.dtype == torch.float64
        if operator(self.operator).choose("auto", scores.device, *self.request, in_double) == "torch":
            return None
        return None if (kernel := kernel_of()) is None else partial(kernel.run, self.own)

    def reduced(
        self,
        definition: Callable[[Tensor], Tensor],
        scores: Tensor,
        target: Tensor | LabelMixture,
        *,
        weight: Tensor | None = None,
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
        reduction: str = "none",
    ) -> Tensor | None:
        """The loss of each row, or their sum or mean, by one kernel; None if no kernel supports the call.

        Args:
            definition: ``(scores) -> the same``, in torch operations; its derivative is the second derivative.
            scores: [B, n], which kernels can read, as the target and the weights, see ``tensors.readable``.
            target: int64 class indices [B], masses [B, n] on the classes, which need not add up to 1, or a
                :class:`LabelMixture`, whose rows without mass cost nothing.
            weight: a factor a class [n]; it gets no gradient.
            label_smoothing: the share of the target that is spread evenly over all classes.
            ignore_index: rows with this index cost nothing.
            reduction: ``"none"``, ``"sum"`` or ``"mean"``; for indices the mean is weighted.

        Returns:
            Losses [B], or one number, in at least single precision.
        """
        if (kernel := self.kernel_for(scores)) is None:
            return None
        if isinstance(target, LabelMixture):
            target, label_smoothing = target.smooth(label_smoothing), 0.0
        options = Options(target, weight, label_smoothing, ignore_index, BY_NAME[reduction])
        return Reduced.apply(scores, partial(kernel, options), None if self.piecewise_linear else definition)  # pyright: ignore[reportReturnType]


def triton_kernel(
    place: str, numbers: Mapping[str, float], tensors: Sequence[str], choices: Mapping[str, Any]
) -> Kernel:
    """Return the kernel for GPUs ``"module:name"`` below ``topk_registry.ops``, see ``rows/triton/driver.py``."""
    module, name = place.split(":")
    kernel = getattr(load(f"topk_registry.ops.{module}"), name)
    return load("topk_registry.ops.rows.triton.driver").TritonRows(kernel, numbers, tensors, choices)


def row_losses(loss: RowLoss, scores: Tensor, target: Tensor | LabelMixture) -> Tensor:
    """The loss of each row, with its exact gradient.

    Args:
        loss: which, for example from :func:`topk_registry.rows.softmax_rows`.
        scores: [B, n], in any floating-point precision.
        target: int64 class indices [B], masses [B, n] on the classes, which need not add up to 1, or a
            :class:`LabelMixture`.

    Returns:
        Losses [B], in at least single precision.

    Example:
        >>> cross_entropy = Curve(lambda log_p, log_not_p, own: -log_p)
        >>> row_losses(softmax_rows(cross_entropy), torch.zeros(1, 4), torch.tensor([2]))
        tensor([1.3863])
    """
    check_logits(scores, "scores")
    check_target(scores, target, ignore_index=None, integers=(torch.int64,))
    if scores.shape[1] <= loss.more_than:
        raise ValueError(f"rows must have more than {loss.more_than:g} scores, got {list(scores.shape)}")
    definition = partial(_of_target, loss, target)
    losses = loss.reduced(definition, scores, target) if readable(scores, target) else None
    return definition(scores) if losses is None else losses


def _of_target(loss: RowLoss, target: Tensor | LabelMixture, scores: Tensor) -> Tensor:
    return loss.definition(scores, written_out(target, scores))


def written_out(target: Tensor | LabelMixture, scores: Tensor) -> Tensor:
    """The target as a definition takes it: a :class:`LabelMixture` as masses [B, n]."""
    return target.dense(scores.shape[1], wide(scores).dtype) if isinstance(target, LabelMixture) else target
