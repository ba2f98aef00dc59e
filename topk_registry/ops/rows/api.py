"""Losses of one row at a time: which kernel computes one, and the call that computes it with every option.

A row costs sum_c m_c L(s, c): labels, label smoothing, mixup and class weights are masses m_c. So one kernel a loss
serves them all, and writes the gradient while the row is in the cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from topk_registry.ops.cpu.entries import address
from topk_registry.ops.rows.autograd import Reduced
from topk_registry.ops.rows.backends import OPERATOR
from topk_registry.ops.targets.checks import check_logits, check_range, check_target
from topk_registry.ops.targets.label_mixture import LabelMixture
from topk_registry.ops.targets.masses import Options, Reduction
from topk_registry.ops.targets.table import wide
from topk_registry.ops.tensors import Route, laid_out, route

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


Own = tuple[Tensor | None, ...]  # the tensors of a loss, which its owner may move or change between two calls


class Kernel(Protocol):
    """Kernel that computes a loss and its gradient in one call."""

    def run(self, own: Own, options: Options, scores: Tensor, wanted: bool) -> tuple[Tensor | None, ...]:
        """The losses or their sum or mean, and, if wanted, the gradient in a precision that holds it.

        ``own`` are the loss's tensors as they are at this call: a kernel keeps no number and no address of them. A
        third tensor of the result is a factor that the gradient has yet to be multiplied by.
        """
        ...


class RowKernel:
    """A compiled kernel for one row, with its numbers and the compiled functions that it calls.

    Args:
        place: of its entry, see :mod:`topk_registry.ops.cpu.entries`.
        numbers: its own numbers.
        functions: for the precision that it computes in, the addresses of functions, 0 for none.
        tensors: for that precision and the loss's own tensors, those that the kernel reads, contiguous on the CPU.
    """

    def __init__(
        self,
        place: str,
        numbers: Sequence[float],
        functions: Callable[[torch.dtype], Sequence[int]] | None = None,
        tensors: Callable[..., Sequence[Tensor | None]] | None = None,
    ) -> None:
        self.place, self.functions, self.tensors = place, functions, tensors
        self.numbers = torch.tensor(numbers, dtype=torch.float64)
        self._prepared: dict[torch.dtype, tuple[int, Sequence[int]]] = {}

    def prepared(self, dtype: torch.dtype) -> tuple[int, Sequence[int]]:
        """The kernel's address, and those of its functions."""
        found = self._prepared.get(dtype)
        if found is None:
            functions = () if self.functions is None else self.functions(dtype)
            found = self._prepared[dtype] = address(self.place, dtype), functions
        return found

    def of_call(self, numbers: Tensor) -> Tensor:
        """The numbers for one call, for a subclass to add to."""
        return numbers

    def run(self, own: Own, options: Options, scores: Tensor, wanted: bool) -> tuple[Tensor, Tensor | None]:
        """See :class:`Kernel`."""
        target, weight, smoothing, ignore_index, reduction = options
        real = torch.float64 if scores.dtype == torch.float64 else torch.float32
        scores = (scores if scores.stride(1) == 1 else scores.contiguous()).detach().resolve_neg()
        kernel, functions = self.prepared(real)
        numbers = self.of_call(self.numbers)
        operands = functions if self.tensors is None else (*functions, *self.tensors(real, *own))
        if isinstance(target, LabelMixture):
            target = target.in_memory()
        else:
            target = laid_out(target, real if target.is_floating_point() else torch.int64)
        weight = None if weight is None else laid_out(weight, torch.float64)
        value, gradient, right = (
            OPERATOR["numba"]
            .kernels()
            .run(kernel, scores, target, weight, smoothing, ignore_index, reduction, numbers, operands, wanted)
        )
        if not right:
            check_range(target, scores.shape[1], ignore_index)
        return value, gradient


def on_cpu(t: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A tensor of a loss as kernels for the CPU read it: itself where it is that, None where there is none."""
    return None if t is None else laid_out(t if t.is_cpu else t.cpu(), dtype)


def readable(scores: Tensor, target: Tensor | LabelMixture, weight: Tensor | None = None) -> bool:
    """Whether row kernels can read these: plain memory of one device, and no gradient to the target."""
    device = scores.device
    parts = [part for part in target if part is not None] if isinstance(target, LabelMixture) else [target]
    for part in parts:
        if part.requires_grad or part.device != device:
            return False
    return (
        route(scores, weight, *parts) is Route.KERNELS
        and scores.dtype in DTYPES
        and scores.ndim == 2
        and (weight is None or weight.device == device)
    )


def backend_of_rows(scores: Tensor) -> str:
    """Choose the backend for a loss of rows."""
    return OPERATOR.choose("auto", scores.device, scores.is_cuda and scores.dtype == torch.float64)


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
        backend: the name of the backend for these scores. For ``"torch"`` the definition serves.
    """

    definition: Callable[[Tensor, Tensor | None], Tensor]
    kernel: Callable[[], Kernel | None] | None = None
    on_gpu: Callable[[], Kernel | None] | None = None
    own: Own = ()
    piecewise_linear: bool = False
    backend: Callable[[Tensor], str] = backend_of_rows

    def kernel_for(self, scores: Tensor) -> Callable[..., tuple[Tensor | None, ...]] | None:
        """Return the call ``(options, scores, wanted)`` of the kernel for these scores, see :class:`Kernel`.

        None where there is none, and where torch operations are to serve: the definition does then.
        """
        found = self.on_gpu if scores.is_cuda else self.kernel
        if found is None or self.backend(scores) == "torch" or (kernel := found()) is None:
            return None
        return partial(kernel.run, self.own)


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
    if readable(scores, target) and (kernel := loss.kernel_for(scores)) is not None:
        curved = None if loss.piecewise_linear else partial(_of_target, loss, target)
        return reduced(kernel, curved, scores, target)
    return _of_target(loss, target, scores)


def _of_target(loss: RowLoss, target: Tensor | LabelMixture, scores: Tensor) -> Tensor:
    return loss.definition(scores, written_out(target, scores))


def written_out(target: Tensor | LabelMixture, scores: Tensor) -> Tensor:
    """The target as a definition takes it: a :class:`LabelMixture` as masses [B, n]."""
    return target.dense(scores.shape[1], wide(scores).dtype) if isinstance(target, LabelMixture) else target


def reduced(
    kernel: Callable[..., tuple[Tensor | None, ...]],
    definition: Callable[[Tensor], Tensor] | None,
    scores: Tensor,
    target: Tensor | LabelMixture,
    *,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "none",
) -> Tensor:
    """The loss of each row, or their sum or mean, by a kernel that serves the call.

    Args:
        kernel: of the loss, from :meth:`RowLoss.kernel_for`.
        definition: ``(scores) -> the same``, in torch operations; its derivative is the second derivative. None: the
            loss is piecewise linear.
        scores: [B, n], n at least 2.
        target: int64 class indices [B], masses [B, n] on the classes, which need not add up to 1, or a
            :class:`LabelMixture`, whose rows without mass cost nothing.
        weight: a factor a class [n]; it gets no gradient.
        label_smoothing: the share of the target that is spread evenly over all classes.
        ignore_index: rows with this index cost nothing.
        reduction: ``"none"``, ``"sum"`` or ``"mean"``; for indices the mean is weighted.

    Returns:
        Losses [B], or one number, in at least single precision.
    """
    if isinstance(target, LabelMixture):
        target, label_smoothing = target.smooth(label_smoothing), 0.0
    options = Options(target, weight, label_smoothing, ignore_index, Reduction.of(reduction))
    return Reduced.apply(scores, partial(kernel, options), definition)  # pyright: ignore[reportReturnType]
