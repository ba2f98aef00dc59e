"""Losses that are a curve of the label's softmax probability."""

from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.nn import functional as F

from topk_registry.ops.rows.api import Kernel, RowLoss, triton_kernel
from topk_registry.ops.rows.curve import NO_PARAMETERS, Curve, address, is_compilable, losses_of, on_gpu, parameters
from topk_registry.ops.rows.numba.backend import RowKernel, on_cpu
from topk_registry.ops.softmax.definition import label_log_probabilities, log_probabilities
from topk_registry.ops.targets.table import of_table, wide


def softmax_rows(curve: Curve | None = None, *, scale: float = 1.0, shift: Tensor | None = None) -> RowLoss:
    """The loss phi(p_y) of a label y, p = softmax(scale * (scores + shift)), for :func:`topk_registry.rows.row_losses`.

    With the curve's ``off``, psi, it is phi(p_y) + sum_{c != y} psi(p_c).

    Args:
        curve: phi, see :class:`topk_registry.rows.Curve`. None: cross-entropy, -log p_y.
        scale: factor of the scores.
        shift: a number for each class [n] that is added to its score; it gets no gradient. None: 0.
    """
    compiled = curve is None or curve.compiled is not None
    key = None if curve is None else curve.key
    kernel = partial(_kernel, key, float(scale)) if compiled else None
    of_gpu = partial(_on_gpu, key, float(scale), shift is not None) if compiled else None
    own = None if curve is None else curve.own, shift
    return RowLoss(partial(definition, curve, scale, shift), kernel, of_gpu, own=own)


def definition(
    curve: Curve | None, scale: float, shift: Tensor | None, scores: Tensor, target: Tensor | None
) -> Tensor:
    """The losses in torch operations."""
    x = wide(scores) if shift is None else wide(scores) + shift.to(wide(scores))
    x = x * scale if scale != 1 else x
    if target is None or target.is_floating_point():
        if curve is None:
            return of_table(-x.log_softmax(-1), target)
        return losses_of(curve, *log_probabilities(x), target)
    if curve is None:
        return F.cross_entropy(x, target, reduction="none")
    if curve.others:
        return losses_of(curve, *log_probabilities(x), target)
    own = None if curve.own is None else curve.own.to(x)[target]
    return curve.definition(*label_log_probabilities(x, target), own)


@lru_cache(maxsize=128)
def _kernel(key: tuple | None, scale: float) -> RowKernel | None:
    if key is not None and not is_compilable(key, softmax=True):
        return None

    numbers = (scale, 0.0, *NO_PARAMETERS) if key is None else (scale, key[3], *parameters(key))

    def tensors(dtype: torch.dtype, own: Tensor | None, shift: Tensor | None):
        return on_cpu(own, dtype), on_cpu(own, torch.float64), on_cpu(shift, dtype)

    alone = key is None or not key[3]  # a label's loss is that of its own probability
    return RowKernel("softmax.numba.kernel:row", numbers, partial(curves, key), tensors, of_label=alone)


def curves(key: tuple | None, dtype: torch.dtype, labels: bool) -> tuple[int, ...]:
    """The functions that the kernel calls, 0 for none: for all classes, and for one class in double precision."""
    if key is None:
        return 0, 0
    return 0 if labels else address(key, dtype, softmax=True), address(key, torch.float64)


@lru_cache(maxsize=128)
def _on_gpu(key: tuple | None, scale: float, shifted: bool) -> Kernel | None:
    form = (None, *_NO_CURVE) if key is None else on_gpu(key)
    if form is None:
        return None
    curve, numbers, choices = form
    return triton_kernel(
        "softmax.triton.rows:softmax_rows",
        {"scale": scale, **numbers},
        ("own_ptr", "added_ptr"),
        {"CURVE": curve, "ADDED": shifted, **choices},
    )


_NO_CURVE = dict.fromkeys((f"x{i}" for i in range(6)), 0.0), {"OTHERS": False, "EACH": False}
