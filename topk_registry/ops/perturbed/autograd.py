"""The gradient of the perturbed top-k: the mean indicator, kept as one index a draw.

A kernel that makes its own noise is an operator of torch's library, which ``torch.compile`` and ``torch.export`` take
as it is: what is random about it is its seed, a tensor.
"""

import inspect
from typing import Any

import torch
from torch import Generator, Tensor

from topk_registry.ops.perturbed import torch_path
from topk_registry.ops.perturbed.kernels import load


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    value, index = output
    ctx.n, ctx.inputs = inputs[0].shape[1], len(inputs)
    ctx.mark_non_differentiable(index)
    ctx.save_for_backward(index, value.isnan())


def _spread(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
    """Adds grad / draws at each draw's index."""
    grad, _ = grad_outputs
    index, invalid = ctx.saved_tensors
    share = (grad / index.shape[1]).masked_fill(invalid, torch.nan)
    grad_scores = grad.new_zeros(len(grad), ctx.n).scatter_add_(1, index, share[:, None].expand_as(index))
    return grad_scores, *[None] * (ctx.inputs - 1)


@torch.library.custom_op("topk_registry::perturbed_kth", mutates_args=())
def seeded_kth(
    scores: Tensor, seed: Tensor, k: int, epsilon: float, num_samples: int, kernel: str
) -> tuple[Tensor, Tensor]:
    """Mean k-th largest [rows] of scores [rows, n] and the classes it was in [rows, num_samples], by a kernel."""
    return load(kernel).perturbed_kth(scores, seed, k, epsilon, num_samples)


@seeded_kth.register_fake
def _(scores: Tensor, seed: Tensor, k: int, epsilon: float, num_samples: int, kernel: str) -> tuple[Tensor, Tensor]:
    return scores.new_empty(scores.shape[0]), scores.new_empty((scores.shape[0], num_samples), dtype=torch.int64)


seeded_kth.register_autograd(_spread, setup_context=_keep)  # for exported graphs


class PerturbedKth(torch.autograd.Function):
    """Scores [rows, n] -> mean k-th largest [rows] and the classes it was in, by a kernel or the torch path.

    A Function around the operator, because functorch cannot differentiate operators of the library.
    """

    @staticmethod
    def forward(
        scores: Tensor,
        k: int,
        epsilon: float,
        num_samples: int,
        generator: Generator | None,
        noise: Tensor | None,
        kernel: str | None,
        seed: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        if kernel is not None and seed is not None:
            return seeded_kth(scores, seed, k, epsilon, num_samples, kernel)
        return torch_path.perturbed_kth(scores, k, epsilon, num_samples, generator, noise)

    setup_context = staticmethod(_keep)
    backward = staticmethod(_spread)


# apply() asks for it at every call, and without this it would be made anew: 20 microseconds
PerturbedKth.forward.__signature__ = inspect.signature(PerturbedKth.forward)  # pyright: ignore[reportFunctionMemberAccess]
