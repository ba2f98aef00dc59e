"""Scores and labels."""

import torch
from torch import Tensor

B = 12


def batch(n: int, *, scale: float = 2.0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Scores [B, n] that want a gradient, and labels [B] of every class."""
    return (scale * torch.randn(B, n, dtype=dtype)).requires_grad_(), torch.arange(B) % n
