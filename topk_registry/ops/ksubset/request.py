"""Arguments of the operator on classes in chunks."""

import torch
from torch import Tensor

from topk_registry.ops.hinge import invertible
from topk_registry.ops.ksubset.api import MAX_TEMPERATURE, check, output_dtype

__all__ = ["check", "output_dtype", "prepare"]


def prepare(logits: Tensor, k: int, temperature: float) -> tuple[Tensor, int, float, int]:
    """Return rows to work on, k with 2k <= n, the temperature, and the sign of the scores."""
    n, sign = logits.shape[-1], 1
    if 2 * k > n:
        k, sign = n - k, -1
    double = logits.dtype == torch.float64 or k > 64 or temperature > MAX_TEMPERATURE
    dtype = torch.float64 if double else torch.float32
    return sign * logits.to(dtype), k, invertible(temperature, dtype), sign
