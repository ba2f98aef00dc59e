"""Register the operator with torch.library: compiled and exported graphs keep it as one node each way."""

import torch
from torch import Tensor

from topk_registry.ops.ksubset import fixed_graph
from topk_registry.ops.ksubset.backends import OPERATOR
from topk_registry.ops.rows.autograd import scaled


@torch.library.custom_op("topk_registry::label_margins", mutates_args=())
def label_margins(s: Tensor, label: Tensor, k: int, theta: float, backend: str) -> tuple[Tensor, Tensor]:
    """The margin [B] of each row's label by the named backend, and its gradient [B, n]."""
    # contiguous: the gradient has the strides of the scores, and a compiler may change those
    return OPERATOR[backend].kernels().label_margins(s.contiguous(), label, k, theta)


@label_margins.register_fake
def _(s: Tensor, label: Tensor, k: int, theta: float, backend: str) -> tuple[Tensor, Tensor]:
    return s.new_empty(s.shape[0], dtype=torch.float64), s.new_empty(s.shape)


@torch.library.custom_op("topk_registry::margins", mutates_args=())
def margins(s: Tensor, k: int, theta: float, backend: str) -> Tensor:
    """The margins [B, n] of every class by the named implementation."""
    return OPERATOR[backend].kernels().margins(s, k, theta)


@margins.register_fake
def _(s: Tensor, k: int, theta: float, backend: str) -> Tensor:
    return s.new_empty(s.shape, dtype=torch.float64 if s.dtype == torch.float64 else torch.float32)


@torch.library.custom_op("topk_registry::margins_backward", mutates_args=())
def _margins_backward(g: Tensor, s: Tensor, k: int, theta: float, backend: str) -> Tensor:
    return OPERATOR[backend].kernels().margins_backward(g, s, k, theta)


@_margins_backward.register_fake
def _(g: Tensor, s: Tensor, k: int, theta: float, backend: str) -> Tensor:
    return s.new_empty(s.shape)


def _save_gradient(ctx, inputs, output) -> None:
    s, label, ctx.k, ctx.theta, _ = inputs
    ctx.save_for_backward(s, label, output[1])


def _scale_gradient(ctx, g: Tensor, _):
    s, label, gradient = ctx.saved_tensors
    if torch.is_grad_enabled():
        ds = fixed_graph.gradient(fixed_graph.label_margins, g, s, label, ctx.k, ctx.theta)
    else:
        ds = scaled(gradient, g, gradient.dtype)
    return ds, None, None, None, None


def _save_scores(ctx, inputs, output) -> None:
    s, ctx.k, ctx.theta, ctx.backend = inputs
    ctx.save_for_backward(s)


def _margins_gradient(ctx, g: Tensor):
    (s,) = ctx.saved_tensors
    if torch.is_grad_enabled():
        ds = fixed_graph.gradient(fixed_graph.margins, g.double(), s, ctx.k, ctx.theta)
    else:
        ds = _margins_backward(g.contiguous(), s, ctx.k, ctx.theta, ctx.backend)
    return ds, None, None, None


label_margins.register_autograd(_scale_gradient, setup_context=_save_gradient)
margins.register_autograd(_margins_gradient, setup_context=_save_scores)
