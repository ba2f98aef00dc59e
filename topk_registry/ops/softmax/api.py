"""Losses that are a curve of the label's softmax probability."""

from functools import lru_cache, partial

import torch
from torch import Tensor

from topk_registry.ops.rows.api import RowKernel, RowLoss, wide
from topk_registry.ops.rows.curve import Curve, address, losses_of, parameters
from topk_registry.ops.softmax.definition import label_log_probabilities, log_probabilities


def softmax_loss(curve: Curve, *, scale: float = 1.0) -> RowLoss:
    """The loss phi(p_y) of a label y, p = softmax(scale * scores), for :func:`topk_registry.row_losses`.

    With the curve's ``off``, psi, it is phi(p_y) + sum_{c != y} psi(p_c).

    Args:
        curve: phi, see :class:`topk_registry.Curve`.
        scale: factor of the scores.
    """
    kernel = None if curve.compiled is None else partial(_kernel, curve.key, float(scale))
    return RowLoss(partial(definition, curve, scale), kernel)


def definition(curve: Curve, scale: float, scores: Tensor, target: Tensor | None) -> Tensor:
    """The losses in torch operations."""
    x = wide(scores) * scale if scale != 1 else wide(scores)
    if target is None or target.is_floating_point() or curve.others:
        return losses_of(curve, *log_probabilities(x), target)
    own = None if curve.own is None else curve.own.to(x)[target]
    return curve.definition(*label_log_probabilities(x, target), own)


@lru_cache(maxsize=128)
def _kernel(key: tuple, scale: float) -> RowKernel:
    def given(dtype: torch.dtype):
        own, others = key[2], key[4]
        tensors = [
            None if own is None else own.detach().to("cpu", kind).contiguous() for kind in (dtype, torch.float64)
        ]
        return [scale, others, *parameters(key)], [*tensors, address(key, dtype), address(key, torch.float64)]

    return RowKernel("topk_registry.ops.softmax.numba.kernel", given)
