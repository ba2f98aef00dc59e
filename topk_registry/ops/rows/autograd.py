"""From logits to the reduced loss as one node of the graph."""

from collections.abc import Callable

import torch
from torch import Tensor

from topk_registry.ops.backend import load, operator
from topk_registry.ops.tensors import Route, is_plain, route


class Reduced(torch.autograd.Function):
    """A loss whose gradient the forward pass has written: ``kernel(logits, wanted) -> (value, gradient)``, or with a
    factor that the gradient has yet to be multiplied by.

    The backward pass is one multiplication, and none where the incoming gradient is 1. On a GPU reading that
    number would synchronise, so a kernel compares it with 1, and multiplies in place unless it is 1. The memory is then
    the gradient that was asked for, and a second backward pass, through a graph that is retained, calls the kernel of
    the loss again.

    Where the backward pass is differentiated itself, the gradient is taken anew from ``definition(logits)``, in
    differentiable operations; without a definition the loss is piecewise linear in the logits, and the gradient a
    constant.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, kernel: Callable, definition: Callable[[Tensor], Tensor] | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        value, gradient, *factor = kernel(logits, ctx.needs_input_grad[0])
        ctx.definition, ctx.kernel, ctx.written = definition, None, None
        if gradient is not None and in_place(gradient, logits.dtype):
            ctx.kernel, ctx.written, gradient = kernel, gradient, None
        ctx.save_for_backward(logits, gradient, *factor)
        return value

    @staticmethod
    def backward(ctx, *g: Tensor):
        logits, gradient, *factor = ctx.saved_tensors
        if torch.is_grad_enabled() and ctx.definition is not None:
            value = ctx.definition(logits)
            (d_logits,) = torch.autograd.grad(value, logits, g[0], create_graph=True)
            return d_logits, None, None
        left = factor[0] if factor else None
        if ctx.kernel is not None:
            gradient = ctx.kernel(logits, True)[1] if ctx.written is None else ctx.written
            if g[0].ndim == 0 and route(g[0]) is Route.KERNELS:
                ctx.written = None
                load("topk_registry.ops.rows.triton.scale").scale(gradient, g[0], left)
                return gradient, None, None
        return scaled(gradient, g[0] if left is None else g[0] * left, logits.dtype), None, None


def in_place(gradient: Tensor, dtype: torch.dtype) -> bool:
    """Whether a kernel can multiply a gradient where it lies, for it to be in a dtype."""
    fits = gradient.is_cuda and gradient.dtype == dtype and gradient.is_contiguous()
    return fits and operator("rows").choose("auto", gradient.device, False) == "triton"


def scaled(gradient: Tensor, g: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient [B, n] times g, a number or one a row, in a dtype; the gradient itself where g is 1."""
    if g.ndim:
        g = g[:, None]
    elif g.is_cpu and not g.requires_grad and is_plain(g) and float(g) == 1.0:
        return gradient if gradient.dtype == dtype else gradient.to(dtype)
    if gradient.is_cuda and route(gradient, g) is Route.KERNELS:
        return torch.mul(
            gradient, g, out=torch.empty_like(gradient, dtype=dtype)
        )  # one pass there, whatever the dtypes
    product = gradient * g.to(torch.float32 if dtype == torch.bfloat16 else gradient.dtype)
    return product if product.dtype == dtype else product.to(dtype)
