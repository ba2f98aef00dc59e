"""Try a backend on a few rows before it serves."""

import torch
from torch import Tensor

from topk_registry.ops.update.backends import OPERATOR, Kernels, State, Update
from topk_registry.ops.update.definition import RandomBits, from_8_bits, scale_shape
from topk_registry.ops.update.rules import RULES

D = 41  # columns, no multiple of a vector
NEIGHBOUR = 0.126  # of two numbers in 8 bits, at most: an eighth, and a little more near the smallest ones
SETTINGS = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}


def trial(kernels: Kernels, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether two steps of AdamW with states in 8 bits are those of torch operations, up to how they are rounded."""
    own, torchs = _trained(kernels, device, dtype), _trained(OPERATOR["torch"].kernels(), device, dtype)
    # both round at random to one of two neighbours: once, then twice, where one step of 0.01 may have either sign
    bounds = ((2.0**-7, 1e-6), (NEIGHBOUR, 1e-4), (NEIGHBOUR, 1e-6), (2.0**-6, 0.02), (0.5, 1e-3), (0.5, 1e-4))
    return all(torch.allclose(a, b, rtol=r, atol=s) for a, b, (r, s) in zip(own, torchs, bounds, strict=True))


def _trained(kernels: Kernels, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Rows and states after one step and after two."""
    rows, bits = torch.linspace(0, 30, 3 * D, device=device).cos().view(3, D).to(dtype), RandomBits(0, device)
    states = [State(torch.zeros_like(rows, dtype=torch.uint8), rows.new_zeros(scale_shape(rows.shape)).float(), signed)
              for signed in (True, False)]  # fmt: skip
    trained = []
    for count in (1, 2):
        gradient = torch.linspace(1, 20 + count, 3 * D, device=device).sin().view(3, D)
        bits.begin(count, 0)
        kernels.step(rows, gradient, states, Update(RULES[torch.optim.AdamW], SETTINGS, count, bits), 0)
        trained.append(rows.float().clone())
        for values, scales, signed in states:
            assert scales is not None
            trained.append(from_8_bits(values, scales, signed=signed))
    return trained
