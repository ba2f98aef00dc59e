"""Gradients of the operator, whichever kernels compute it.

The kernels of a backward pass have no derivatives of their own. Where a backward pass is itself differentiated, it is
computed by torch operations instead (fixed_graph.py).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from topk_registry.ops.calls import positional
from topk_registry.ops.ksubset import fixed_graph
from topk_registry.ops.tensors import Route, route


@positional
class LabelMargins(torch.autograd.Function):
    """One number a row [B], by ``kernel(s, label, alpha) -> (value [B], slope [B], gradient [B, n])``.

    It is the label's margin, with its gradient, or a function of the margin, with its slope. The forward pass writes
    the gradient, so the backward pass is one product. ``operations(s, label, alpha)`` is the value by torch operations.
    """

    @staticmethod
    def forward(
        s: Tensor, label: Tensor, alpha: Tensor | None, kernel: Callable, operations: Callable
    ) -> tuple[Tensor, Tensor, Tensor]:
        return kernel(s, label, alpha)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        *tensors, _, ctx.operations = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # no zeros of the size of the logits for the gradient as an output
        ctx.save_for_backward(*tensors, *output[1:])

    @staticmethod
    def backward(ctx, g: Tensor, *_):
        if g is None:
            return None, None, None, None, None
        *tensors, slope, gradient = ctx.saved_tensors
        again = torch.is_grad_enabled()
        ds = fixed_graph.gradient(ctx.operations, g, *tensors) if again else scaled(g * slope, gradient)
        return ds, None, None, None, None


@positional
class Margins(torch.autograd.Function):
    """The margins [B, n] of every class by ``forward(s, k, theta)``, their gradient by ``backward(g, s, k, theta)``:
    nothing but the scores is kept from one to the other."""

    @staticmethod
    def forward(s: Tensor, k: int, theta: float, forward: Callable, backward: Callable) -> Tensor:
        return forward(s, k, theta)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        s, ctx.k, ctx.theta, _, ctx.kernel = inputs
        ctx.save_for_backward(s)

    @staticmethod
    def backward(ctx, g: Tensor):
        (s,) = ctx.saved_tensors
        if torch.is_grad_enabled() or route(g) is not Route.KERNELS:
            ds = fixed_graph.gradient(fixed_graph.margins, g.double(), s, ctx.k, ctx.theta)
        else:
            ds = ctx.kernel(g, s, ctx.k, ctx.theta)
        return ds, None, None, None, None


def scaled(g: Tensor, gradient: Tensor) -> Tensor:
    """g [B] times the rows of a gradient [B, n]."""
    return g.to(gradient.dtype).unsqueeze(1) * gradient
