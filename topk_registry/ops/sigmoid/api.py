"""Losses that are a sum over classes of a curve of each one's sigmoid."""

from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.nn import functional as F

from topk_registry.ops.rows.api import Kernel, RowLoss, triton_kernel
from topk_registry.ops.rows.curve import Curve, Key, address, is_compilable, losses_of, on_gpu, parameters
from topk_registry.ops.rows.numba.backend import RowKernel
from topk_registry.ops.targets.table import wide


def sigmoid_rows(curve: Curve) -> RowLoss:
    """The loss phi(p_y) + sum_{c != y} psi(p_c) of a label y, p = sigmoid(scores), for
    :func:`topk_registry.rows.row_losses`.

    Args:
        curve: phi is its ``on`` and psi its ``off``, see :class:`topk_registry.rows.Curve`.
    """
    if curve.compiled is None:
        return RowLoss(partial(definition, curve))
    kernels = partial(_kernel, curve.key), partial(_on_gpu, curve.key)
    return RowLoss(partial(definition, curve), *kernels, own=(curve.own,))


def definition(curve: Curve, scores: Tensor, target: Tensor | None) -> Tensor:
    """The losses in torch operations."""
    x = wide(scores)
    return losses_of(curve, -F.softplus(-x, threshold=40.0), -F.softplus(x, threshold=40.0), target)


@lru_cache(maxsize=128)
def _kernel(key: Key) -> RowKernel | None:
    if not is_compilable(key):
        return None

    return RowKernel("sigmoid.numba.kernel:row", (key.logarithms, *parameters(key)), partial(curves, key))


def curves(key: Key, dtype: torch.dtype, labels: bool) -> tuple[int, ...]:
    """The functions that the kernel calls."""
    return (address(key, dtype),)


@lru_cache(maxsize=128)
def _on_gpu(key: Key) -> Kernel | None:
    if (form := on_gpu(key)) is None:
        return None
    curve, numbers, choices = form
    return triton_kernel("sigmoid.triton.rows:sigmoid_rows", numbers, ("own_ptr",), {"CURVE": curve, **choices})
