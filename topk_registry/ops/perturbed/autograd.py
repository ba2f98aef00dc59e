"""The gradient of the perturbed top-k: the mean indicator, stored as one index per draw."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class PerturbedKth(torch.autograd.Function):
    """Mean k-th largest score [rows] of scores [rows, n], and its class per draw [rows, draws], by ``kernel``.

    The backward pass adds grad / draws at the class of each draw.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, kernel: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        value, index = kernel(scores)
        keep(ctx, scores, value, index)
        return value, index

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return spread(ctx, grad_outputs[0]), None


def keep(ctx: Any, scores: Tensor, value: Tensor, index: Tensor) -> None:
    ctx.n = scores.shape[1]
    ctx.mark_non_differentiable(index)
    ctx.save_for_backward(index, value.isnan())


def spread(ctx: Any, grad: Tensor) -> Tensor:
    index, invalid = ctx.saved_tensors
    share = (grad / index.shape[1]).masked_fill(invalid, torch.nan)
    return grad.new_zeros(len(grad), ctx.n).scatter_add_(1, index, share[:, None].expand_as(index))
