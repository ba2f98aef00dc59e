"""The operator as a node of compiled graphs, with a gradient. All noise is a function of the seed."""

from typing import Any

import torch
from torch import Tensor

from topk_registry.ops.backend import load


@torch.library.custom_op("topk_registry::perturbed_kth", mutates_args=())
def perturbed_kth(
    scores: Tensor, seed: Tensor, k: int, epsilon: float, num_samples: int, backend: str
) -> tuple[Tensor, Tensor]:
    """Call ``kth`` of a backend: return the k-th largest perturbed scores [B] and their classes [B, num_samples]."""
    return kernel(backend)(scores, seed, k, epsilon, num_samples)


def kernel(backend: str) -> Any:
    """Return the function ``kth`` of the backend "numba" or "triton"."""
    return load("topk_registry.ops.perturbed." + {"numba": "cpu", "triton": "triton"}[backend]).kth


@perturbed_kth.register_fake
def _(scores: Tensor, seed: Tensor, k: int, epsilon: float, num_samples: int, backend: str) -> tuple[Tensor, Tensor]:
    return scores.new_empty(scores.shape[0]), scores.new_empty((scores.shape[0], num_samples), dtype=torch.int64)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    value, index = output
    ctx.n = inputs[0].shape[1]
    ctx.mark_non_differentiable(index)
    ctx.save_for_backward(index, value.isnan())


def _spread(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    index, invalid = ctx.saved_tensors
    share = (grad / index.shape[1]).masked_fill(invalid, torch.nan)
    spread = grad.new_zeros(len(grad), ctx.n).scatter_add_(1, index, share[:, None].expand_as(index))
    return spread, None, None, None, None, None


perturbed_kth.register_autograd(_spread, setup_context=_keep)
