"""Rows of each kind for compiled kernels, targets of both kinds, and values with their gradients."""

import torch

from topk_registry.rows import RowLoss, row_losses

B, N = 8, 150


def scores(kind: str) -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    s = torch.randn(B, N, generator=g, dtype=torch.float64)
    if kind == "tied":
        return s.round()
    if kind == "ruled out":
        s[:, 1] = -torch.inf
    return {"flat": 1e-3 * s, "leaders": s + 40 * (torch.arange(N) < 2)}.get(kind, s)


def targets(s: torch.Tensor) -> list[torch.Tensor]:
    label = torch.arange(2, B + 2)
    label[:3] = s[:3].argmax(-1)
    q = torch.linspace(-1, 1, N, dtype=torch.float64).softmax(-1).repeat(B, 1)
    q[:, 1], q[0] = 0, 0  # a class and a row without mass
    return [label, 0.5 * q]


def both(loss: RowLoss, s: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    s = s.clone().requires_grad_()
    value = row_losses(loss, s, target)
    (gradient,) = torch.autograd.grad(value.sum(), s)
    return value.detach().double(), gradient.double()
