"""Gradients of the operator, whichever kernels compute it.

They are differentiable once. Their backward passes work in place or hand out what the forward pass has written, so
autograd would take a second derivative from them that lacks terms; :func:`once` makes it refuse instead.
"""

import functools
import inspect
from collections.abc import Callable

import torch
from torch import Tensor


class _Once(torch.autograd.Function):
    """A gradient that depends on ``source`` in a way that autograd cannot follow."""

    @staticmethod
    def forward(gradient: Tensor, source: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, _):
        raise RuntimeError(
            "the k-subset operator is differentiable once, a second derivative was asked for: take it from "
            "topk_registry.ops.ksubset.definition.log_odds_by_recursion"
        )


def once(backward: Callable) -> Callable:
    """Let a backward pass run under ``create_graph``, but not be differentiated; saves the source of its gradients
    first."""

    @functools.wraps(backward)
    def wrapped(ctx, *cotangents):
        with torch.no_grad():
            gradients = backward(ctx, *cotangents)
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return gradients
        source = ctx.saved_tensors[0]
        return tuple(None if g is None else _Once.apply(g, source) for g in gradients)

    return wrapped


class LabelMargins(torch.autograd.Function):
    """The label's margin [B] by ``kernel(s, label, k, theta) -> (margin, gradient)``: the forward pass writes the
    gradient, so the backward pass is one product."""

    @staticmethod
    def forward(s: Tensor, label: Tensor, k: int, theta: float, kernel: Callable) -> tuple[Tensor, Tensor]:
        return kernel(s, label, k, theta)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(output[1])  # differentiable to autograd, for `once` to see where it comes from
        ctx.set_materialize_grads(False)  # no zeros of the size of the logits for the second output

    @staticmethod
    @once
    def backward(ctx, g: Tensor, _):
        if g is None:
            return None, None, None, None, None
        (gradient,) = ctx.saved_tensors
        return g.to(gradient.dtype)[:, None] * gradient, None, None, None, None


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
    @once
    def backward(ctx, g: Tensor):
        (s,) = ctx.saved_tensors
        return ctx.kernel(g, s, ctx.k, ctx.theta), None, None, None, None


for _function in (LabelMargins, Margins):  # torch asks for it at every call, and computing it takes longer than the call
    _function.forward.__signature__ = inspect.signature(_function.forward)
