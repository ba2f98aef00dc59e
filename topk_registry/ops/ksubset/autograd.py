"""Gradients of the operator, whichever kernels compute it.

It is differentiable once: the kernels of the backward pass have no derivatives of their own, and instead of a second
derivative that lacks terms there is an error.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from topk_registry.ops.calls import positional


@positional
class LabelMargins(torch.autograd.Function):
    """A number a row, [B], by ``kernel(s, label, alpha) -> (value [B], slope [B], gradient [B, n])``: the label's
    margin, whose gradient that is, or a function of it with its slope. The forward pass writes the gradient, so the
    backward pass is one product."""

    @staticmethod
    def forward(s: Tensor, label: Tensor, alpha: Tensor | None, kernel: Callable) -> tuple[Tensor, Tensor, Tensor]:
        return kernel(s, label, alpha)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*output[1:])  # as outputs they are known to depend on the scores
        ctx.set_materialize_grads(False)  # no zeros of the size of the logits for the gradient as an output

    @staticmethod
    def backward(ctx, g: Tensor, *_):
        if g is None:
            return None, None, None, None
        slope, gradient = ctx.saved_tensors
        return once(scaled, g * slope, gradient), None, None, None


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
        return once(ctx.kernel, g, ctx.saved_tensors[0], ctx.k, ctx.theta), None, None, None, None


class _Gradient(torch.autograd.Function):
    """What a backward pass computes, where someone may ask for its derivative."""

    @staticmethod
    def forward(kernel: Callable, *args):
        return kernel(*args)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(
            "the k-subset operator is differentiable once, a second derivative was asked for: take it from "
            "topk_registry.ops.ksubset.definition.log_odds_by_recursion"
        )


def once(kernel: Callable, *args):
    """What ``kernel(*args)`` gives, one gradient or several, none of which can be differentiated."""
    return _Gradient.apply(kernel, *args) if torch.is_grad_enabled() else kernel(*args)


def scaled(g: Tensor, gradient: Tensor) -> Tensor:
    """g [B] times the rows of a gradient [B, n]."""
    return g.to(gradient.dtype).unsqueeze(1) * gradient
