"""Register the operator with torch.library, whole in compiled and exported graphs. Its only randomness is the seed."""

from typing import Any

import torch
from torch import Tensor

from topk_registry.ops.perturbed.autograd import keep, spread
from topk_registry.ops.perturbed.backends import OPERATOR


@torch.library.custom_op("topk_registry::perturbed_kth", mutates_args=())
def perturbed_kth(
    scores: Tensor, seed: Tensor, k: int, epsilon: float, num_samples: int, backend: str
) -> tuple[Tensor, Tensor]:
    """Mean k-th largest [rows] of scores [rows, n] and the classes it was in [rows, num_samples]."""
    return OPERATOR[backend].kernels().perturbed_kth(scores, seed, k, epsilon, num_samples)


@perturbed_kth.register_fake
def _(scores: Tensor, seed: Tensor, k: int, epsilon: float, num_samples: int, backend: str) -> tuple[Tensor, Tensor]:
    return scores.new_empty(scores.shape[0]), scores.new_empty((scores.shape[0], num_samples), dtype=torch.int64)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    keep(ctx, inputs[0], *output)


def _spread(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return spread(ctx, grad), None, None, None, None, None


perturbed_kth.register_autograd(_spread, setup_context=_keep)
