"""The gradient of the perturbed top-k: the mean indicator, kept as one index a draw."""

from typing import Any

import torch
from torch import Generator, Tensor

from topk_registry.ops.perturbed.torch_path import perturbed_kth


class PerturbedKth(torch.autograd.Function):
    """Scores [rows, n] -> mean k-th largest [rows]; the backward pass adds grad / draws at each draw's index."""

    @staticmethod
    def forward(
        scores: Tensor, k: int, epsilon: float, num_samples: int, generator: Generator | None, noise: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return perturbed_kth(scores, k, epsilon, num_samples, generator, noise)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        value, index = output
        ctx.n = inputs[0].shape[1]
        ctx.mark_non_differentiable(index)
        ctx.save_for_backward(index, value.isnan())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad, _ = grad_outputs
        index, invalid = ctx.saved_tensors
        share = (grad / index.shape[1]).masked_fill(invalid, torch.nan)
        grad_scores = grad.new_zeros(len(grad), ctx.n).scatter_add_(1, index, share[:, None].expand_as(index))
        return grad_scores, None, None, None, None, None
