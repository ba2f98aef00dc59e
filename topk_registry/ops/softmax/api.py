"""Losses that are a curve of the label's softmax probability."""

from dataclasses import replace
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.nn import functional as F

from topk_registry.ops.rows.api import Kernel, RowLoss, triton_kernel
from topk_registry.ops.rows.curve import (
    NO_PARAMETERS,
    Curve,
    Key,
    address,
    is_compilable,
    losses_of,
    on_gpu,
    parameters,
)
from topk_registry.ops.rows.numba.backend import RowKernel, on_cpu
from topk_registry.ops.softmax.definition import among_best, label_log_probabilities, log_probabilities
from topk_registry.ops.targets.table import of_table, wide
from topk_registry.ops.values import integer, number

LARGEST_ON_GPU = 64  # the kernel takes a pass for each of the best; beyond, the selection of torch is better


def softmax_rows(
    curve: Curve | None = None, *, scale: float = 1.0, shift: Tensor | None = None, best: int = 0
) -> RowLoss:
    """The loss phi(p_y) of a label y, p = softmax(scale * (scores + shift)), for :func:`topk_registry.rows.row_losses`.

    With the curve's ``off``, psi, it is phi(p_y) + sum_{c != y} psi(p_c).

    Args:
        curve: phi, see :class:`topk_registry.rows.Curve`. None: cross-entropy, -log p_y.
        scale: factor of the scores.
        shift: a number for each class [n] that is added to its score; it gets no gradient. None: 0.
        best: give the curve 1 as ``own`` for the ``best`` largest scores and 0 for others; ties at the boundary get 0.
            0: it gets its own numbers.
    """
    best, scale = integer(best, "best", at_least=0), number(scale, "scale")
    if best and (curve is None or curve.own is not None):
        raise ValueError("best needs a curve without numbers of its own")
    compiled = curve is None or curve.compiled is not None
    key = None if curve is None else curve.key
    if best and key is not None:
        key = key._replace(each=True)
    kernel = partial(_kernel, key, float(scale), best) if compiled else None
    of_gpu = partial(_on_gpu, key, float(scale), shift is not None, best) if compiled else None
    own = None if curve is None else curve.own, shift
    in_torch = partial(definition, curve, scale, shift, best)
    return RowLoss(in_torch, kernel, of_gpu, own=own, least_classes=max(2, best + 1))


def definition(
    curve: Curve | None, scale: float, shift: Tensor | None, best: int, scores: Tensor, target: Tensor | None
) -> Tensor:
    """The losses in torch operations."""
    s = wide(scores) if shift is None else wide(scores) + shift.to(wide(scores))
    x = s * scale if scale != 1 else s
    label = None if target is None or target.is_floating_point() else target
    if curve is None:
        if label is None:
            return of_table(-x.log_softmax(-1), target)
        return F.cross_entropy(x, label, reduction="none")
    if label is None or curve.others:
        curve = replace(curve, own=among_best(s, best)) if best else curve
        return losses_of(curve, *log_probabilities(x), target)
    own = None if curve.own is None else curve.own.to(x)[label]
    return curve.definition(*label_log_probabilities(x, label), among_best(s, best, label) if best else own)


@lru_cache(maxsize=128)
def _kernel(key: Key | None, scale: float, best: int) -> RowKernel | None:
    if key is not None and not is_compilable(key, softmax=True):
        return None

    numbers = (scale, 0.0, *NO_PARAMETERS) if key is None else (scale, key.others, *parameters(key))

    def tensors(dtype: torch.dtype, own: Tensor | None, shift: Tensor | None):
        return on_cpu(own, dtype), on_cpu(own, torch.float64), on_cpu(shift, dtype)

    alone = key is None or not key.others  # a label's loss is that of its own probability
    place, numbers = ("best", (*numbers, best)) if best else ("kernel", numbers)
    return RowKernel(f"softmax.numba.{place}:row", numbers, partial(curves, key), tensors, of_label=alone)


def curves(key: Key | None, dtype: torch.dtype, labels: bool) -> tuple[int, ...]:
    """The functions that the kernel calls, 0 for none: for all classes, and for one class in double precision."""
    if key is None:
        return 0, 0
    return 0 if labels else address(key, dtype, softmax=True), address(key, torch.float64)


@lru_cache(maxsize=128)
def _on_gpu(key: Key | None, scale: float, shifted: bool, best: int) -> Kernel | None:
    if best > LARGEST_ON_GPU or (best and shifted):
        return None
    form = (None, *_NO_CURVE) if key is None else on_gpu(key)
    if form is None:
        return None
    curve, numbers, choices = form
    return triton_kernel(
        "softmax.triton.rows:softmax_rows",
        {"scale": scale, **numbers},
        ("own_ptr", "added_ptr"),
        {"CURVE": curve, "ADDED": shifted, "BEST": best, **choices},
    )


_NO_CURVE = dict.fromkeys((f"x{i}" for i in range(6)), 0.0), {"OTHERS": False, "EACH": False}
