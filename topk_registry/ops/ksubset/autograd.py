"""The smooth top-k loss in PyTorch operations. To limit memory, the gradient is computed in blocks of rows."""

from collections.abc import Callable

import torch
from torch import Tensor

from topk_registry.ops.fused import by_definition
from topk_registry.ops.hinge import soft_hinge
from topk_registry.ops.ksubset import graph
from topk_registry.ops.parts import Parts
from topk_registry.ops.tensors import Route, route

LEAST_TEMPERATURE = 1e-300  # has a finite reciprocal in double precision; margins already equal their limit at 0
BLOCK = 1 << 24  # approximate number of values that a block of rows stores for its backward pass


def working_dtype(s: Tensor, k: int, temperature: float) -> torch.dtype:
    """Return the dtype in which PyTorch operations compute the margins of the scores s [B, n].

    The dtype is single precision if the scores are on a GPU and not in double precision, min(k, n - k) is at most 64,
    and the temperature is between 1e-30 and 1e30. Otherwise, the dtype is double precision.
    """
    small = min(k, s.shape[1] - k) <= graph.SMALL_K and 1e-30 < temperature < 1e30
    return torch.float32 if s.is_cuda and small and s.dtype != torch.float64 else torch.float64


def losses_of(logits: Tensor, parts: Parts, k: int, tau: float, alpha: Tensor) -> Tensor:
    """Return the smooth top-k loss of each row [B], computed by differentiable PyTorch operations.

    The loss of a row is sum_c q_c tau softplus((alpha_c - m_c / k) / tau). The mass q_c, which ``parts`` holds, is the
    weight of class c in the target of the row. The margin m_c is the score of class c minus the k-th largest score of
    the other classes, smoothed with temperature k tau. A row without mass has loss 0. ``alpha`` is one number [] or one
    number per class [n]. The losses are in double precision for logits in double precision, else in single precision.
    """
    tau = max(tau, LEAST_TEMPERATURE)
    s = logits.to(working_dtype(logits, k, k * tau))
    alpha = alpha.to(s)
    if parts.has_labels_only and parts.labels is not None and parts.shares is not None:
        shares = parts.shares.to(s.dtype)
        margins = graph.margins(torch.where(shares == 0, 0.0, s), k, k * tau)
        gap = alpha[parts.labels] if alpha.ndim else alpha
        losses = (shares * soft_hinge(gap - margins.gather(1, parts.labels) / k, tau))[:, 0]
    else:
        q = parts.table(s.shape[1], s.dtype)
        has_mass = (q != 0).any(1, keepdim=True)
        margins = graph.margins(torch.where(has_mass, s, 0.0), k, k * tau)
        hinge = soft_hinge(alpha - margins / k, tau)
        # a finite hinge is kept where the mass is 0, because the gradient with respect to the mass is the hinge
        losses = (q * hinge.masked_fill((q == 0) & ~hinge.isfinite(), 0.0)).sum(1)
    return losses.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)


def losses_and_gradient(
    logits: Tensor, parts: Parts, k: int, tau: float, alpha: Tensor, needs_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the losses [B] of :func:`losses_of`, and their gradient with respect to the logits [B, n].

    If ``needs_grad`` is False, the second result is None. The rows are processed in blocks to limit memory.
    """
    losses, gradients = [], []
    for rows in _blocks(logits, k):
        with torch.set_grad_enabled(needs_grad):
            s = logits[rows].detach().requires_grad_(needs_grad)
            block = losses_of(s, parts.rows(rows), k, tau, alpha)
            total = block.sum()  # with grad_outputs for the losses, torch would import sympy, which takes half a second
        losses.append(block.detach())
        if needs_grad:
            gradients.append(torch.autograd.grad(total, s)[0])
    return torch.cat(losses), torch.cat(gradients) if needs_grad else None


def in_blocks(function: Callable[..., Tensor], s: Tensor, k: int, temperature: float) -> Tensor:
    """Return ``function(s, k, temperature)`` [B, n] for scores s [B, n], computed for one block of rows at a time.

    To limit memory, the function is called for each block in the forward pass, and again in the backward pass.
    Therefore, the result for a row must depend only on this row. Scores that fit in one block are not divided.
    """
    if len(_blocks(s, k)) == 1 or route(s) is not Route.KERNELS:
        return function(s, k, temperature)
    return _InBlocks.apply(s, k, lambda rows: function(rows, k, temperature))  # pyright: ignore[reportReturnType]


def _blocks(s: Tensor, k: int) -> list[slice]:
    size = min(k, s.shape[1] - k)
    step = max(1, BLOCK // (s.shape[1] * (3 * size + 20)))
    return [slice(i, i + step) for i in range(0, max(1, len(s)), step)]


class _InBlocks(torch.autograd.Function):
    """Apply a function to blocks of rows. The backward pass calls the function again, so only the scores are saved."""

    @staticmethod
    def forward(ctx, s: Tensor, k: int, function: Callable[[Tensor], Tensor]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.k, ctx.function = k, function
        ctx.save_for_backward(s)
        return torch.cat([function(s[rows]) for rows in _blocks(s, k)])

    @staticmethod
    def backward(ctx, g: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (s,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            return by_definition(ctx.function, s, g), None, None
        return torch.cat([by_definition(ctx.function, s[rows], g[rows]) for rows in _blocks(s, ctx.k)]), None, None
