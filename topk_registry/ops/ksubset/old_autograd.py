"""Gradients of the operator, whichever kernels compute it.

The kernels of a backward pass have no derivatives of their own. Where a backward pass is itself differentiated, it is
computed by torch operations instead (fixed_graph.py).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from topk_registry.ops.ksubset import fixed_graph
from topk_registry.ops.tensors import Route, route


class Margins(torch.autograd.Function):
    """The margins [B, n] of every class by ``forward(s, k, theta)``, their gradient by ``backward(g, s, k, theta)``:
    nothing but the scores is kept from one to the other."""

    @staticmethod
    def forward(ctx, s: Tensor, k: int, theta: float, forward: Callable, backward: Callable) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.k, ctx.theta, ctx.kernel = k, theta, backward
        ctx.save_for_backward(s)
        return forward(s, k, theta)

    @staticmethod
    def backward(ctx, g: Tensor):
        (s,) = ctx.saved_tensors
        if torch.is_grad_enabled() or route(g) is not Route.KERNELS:
            ds = fixed_graph.gradient(fixed_graph.margins, g.double(), s, ctx.k, ctx.theta)
        else:
            ds = ctx.kernel(g, s, ctx.k, ctx.theta)
        return ds, None, None, None, None
