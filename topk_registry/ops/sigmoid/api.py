"""Losses that are a sum over classes of a curve of each one's sigmoid."""

from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.nn import functional as F

from topk_registry.ops.rows.api import RowKernel, RowLoss, wide
from topk_registry.ops.rows.curve import Curve, address, losses_of, parameters


def sigmoid_loss(curve: Curve) -> RowLoss:
    """The loss phi(p_y) + sum_{c != y} psi(p_c) of a label y, p = sigmoid(scores), for
    :func:`topk_registry.row_losses`.

    Args:
        curve: phi is its ``on`` and psi its ``off``, see :class:`topk_registry.Curve`.
    """
    return RowLoss(partial(definition, curve), None if curve.compiled is None else partial(_kernel, curve.key))


def definition(curve: Curve, scores: Tensor, target: Tensor | None) -> Tensor:
    """The losses in torch operations."""
    x = wide(scores)
    return losses_of(curve, -F.softplus(-x, threshold=40.0), -F.softplus(x, threshold=40.0), target)


@lru_cache(maxsize=128)
def _kernel(key: tuple) -> RowKernel:
    def given(dtype: torch.dtype):
        own, logarithms = key[2], key[5]
        tensor = None if own is None else own.detach().to("cpu", dtype).contiguous()
        return [logarithms, *parameters(key)], [tensor, address(key, dtype)]

    return RowKernel("topk_registry.ops.sigmoid.numba.kernel", given)
