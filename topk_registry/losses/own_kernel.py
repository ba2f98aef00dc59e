"""A plug-in's own kernel for the CPU: a function of arrays, with everything around it done here."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from topk_registry.ops.rows.backends import Own
from topk_registry.ops.targets.checks import check_range
from topk_registry.ops.targets.label_mixture import LabelMixture
from topk_registry.ops.targets.masses import Masses, Options
from topk_registry.ops.targets.table import wide

Arrays = Callable[[Any, Any, Any, Any], None]


class ArrayKernel:
    """Kernel that a function of NumPy arrays computes; see :func:`array_kernel`."""

    def __init__(self, compute: Arrays) -> None:
        self.compute = compute

    def run(self, own: Own, options: Options, scores: Tensor, wanted: bool) -> tuple[Tensor, Tensor | None]:
        """See :class:`topk_registry.ops.rows.api.Kernel`."""
        target, weight, smoothing, ignore_index, reduction = options
        if isinstance(target, LabelMixture) or not target.is_floating_point():
            check_range(target, scores.shape[1], ignore_index)
        scores = wide(scores.detach()).contiguous()
        masses = Masses.of(
            target,
            scores.shape[1],
            weight=weight,
            smoothing=smoothing,
            ignore_index=ignore_index,
            dtype=scores.dtype,
        )
        scores = masses.counted(scores)
        m = masses.dense(scores.shape[1], scores.dtype)
        m = m.clone() if weight is None else m * weight.to(m)
        if masses.ignored is not None:
            m[masses.ignored] = 0.0
        losses = scores.new_empty(len(scores))
        gradient = torch.empty_like(scores) if wanted else None
        self.compute(scores.numpy(), m.numpy(), losses.numpy(), None if gradient is None else gradient.numpy())
        counts, name = masses.counts, reduction.name.lower()
        if gradient is not None and name == "mean":
            gradient /= len(scores) if counts is None else counts.sum().to(gradient)
        # the masses hold the class weights, and what is ignored costs 0 already
        value = masses._replace(ignored=None).reduced(losses, name)
        return value, gradient


def array_kernel(compute: Arrays) -> Callable[[], ArrayKernel]:
    """Return a :class:`RowLoss`'s ``kernel`` for the CPU from a function of NumPy arrays.

    Args:
        compute: ``(scores [B, n], masses [B, n], losses [B], gradient [B, n])``. It writes for each row the loss
            sum_c m_c L(s, c) into ``losses``, and its gradient to the scores into ``gradient``, unless that is None.
            Labels, label smoothing, mixup, class weights and ignored rows are in the masses; they need not add up to 1.
            Arrays are of one precision, single or double, and contiguous. numba compiles such a function.

    Targets, reductions, half precision, second derivatives, compiled graphs and devices without a kernel are the
    caller's matter: the loss's definition serves where the kernel does not.

    Example:
        >>> def squares(scores, masses, losses, gradient):
        ...     losses[:] = (masses * scores**2).sum(-1)
        ...     if gradient is not None:
        ...         gradient[:] = 2 * masses * scores
        >>> loss = topk_registry.rows.RowLoss(
        ...     lambda s, target: s.square() if target is None else s.square().gather(1, target[:, None])[:, 0],
        ...     kernel=array_kernel(squares),
        ... )
        >>> topk_registry.rows.row_losses(loss, torch.tensor([[1.0, 3.0]]), torch.tensor([1]))
        tensor([9.])
    """
    kernel = ArrayKernel(compute)
    return lambda: kernel
