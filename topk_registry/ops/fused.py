"""Autograd function for operators that compute the losses and the gradient in the same kernel."""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from topk_registry.ops.backend import load, too_old
from topk_registry.ops.tensors import is_plain

Kernel = Callable[[Tensor, bool], tuple[Tensor, Tensor | None]]


class Fused(torch.autograd.Function):
    """Losses [B] of logits [B, n], or the sum [] of the losses, computed by a kernel together with the gradient.

    ``kernel(logits, needs_grad)`` returns the losses [B] or their sum [], and the gradient [B, n] of the sum with
    respect to the logits. The gradient may be None if ``needs_grad`` is False.

    The forward pass stores the gradient, and the backward pass scales the stored gradient in place. A second backward
    pass through the same graph therefore calls the kernel again. If ``torch.autograd.grad`` is called with
    ``create_graph`` or ``is_grads_batched``, the backward pass differentiates ``definition(logits)`` instead.
    ``definition`` must return the losses [B] and use only differentiable operations.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx, logits: Tensor, kernel: Kernel, definition: Callable[[Tensor], Tensor]
    ) -> Tensor:
        losses, ctx.gradient = kernel(logits, ctx.needs_input_grad[0])
        ctx.kernel, ctx.definition = kernel, definition
        ctx.save_for_backward(logits)
        return losses

    @staticmethod
    def backward(ctx, g: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (logits,) = ctx.saved_tensors
        if torch.is_grad_enabled() or not is_plain(g):
            return by_definition(ctx.definition, logits, g), None, None
        gradient, ctx.gradient = ctx.gradient, None
        if gradient is None:
            gradient = ctx.kernel(logits, True)[1]
        return scaled_in_place(gradient, g, logits.dtype), None, None


def by_definition(definition: Callable[[Tensor], Tensor], logits: Tensor, g: Tensor) -> Tensor:
    """Propagate the gradient ``g`` back through ``definition(logits)``: return the gradient of the logits [B, n].

    ``definition(logits)`` returns losses [B]. ``g`` is the gradient with respect to these losses [B], or with respect
    to their sum []. If gradients are enabled, the result is differentiable with respect to ``logits`` and ``g``.
    """
    differentiable = torch.is_grad_enabled()
    with torch.enable_grad():
        s = logits if differentiable else logits.detach().requires_grad_()
        losses = definition(s)
        return torch.autograd.grad(losses, s, g.expand_as(losses), create_graph=differentiable)[0]


def scaled_in_place(gradient: Tensor, g: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply ``gradient`` [B, n] in place by ``g``, one factor [] or one per row [B]. Return it in ``dtype``."""
    # one number is usually 1, and then the gradient is not read or written
    if g.ndim and g.numel() and g.stride() == (0,):
        g = g[0]
    if g.ndim == 0 and g.is_cpu:
        factor = float(g)
        if factor != 1.0:
            gradient.mul_(factor)
    elif g.ndim == 0 and _scales(gradient):
        load("topk_registry.ops.gpu.scale").scale(gradient, g)  # reading g here would wait for the GPU
    else:
        gradient.mul_(g.to(gradient.dtype) if g.ndim == 0 else g.to(gradient.dtype)[:, None])
    return gradient if gradient.dtype == dtype else gradient.to(dtype)


def _scales(gradient: Tensor) -> bool:
    if not gradient.is_cuda or not gradient.is_contiguous() or gradient.dtype == torch.float64:
        return False
    return _has_triton() and not too_old(gradient.device)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
