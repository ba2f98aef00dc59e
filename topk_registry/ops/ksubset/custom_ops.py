"""The operator as torch.library knows it: whole in compiled and exported graphs, which keep it as one node each way.

It is imported when a graph is first compiled, for that brings in the compiler. Import it by hand before loading a saved
exported program with this operator in it.
"""

import torch
from torch import Tensor

from topk_registry.ops.ksubset import backends
from topk_registry.ops.ksubset.autograd import scaled


@torch.library.custom_op("topk_registry::label_margins", mutates_args=())
def _label_margins(s: Tensor, label: Tensor, k: int, theta: float, backend: str) -> tuple[Tensor, Tensor]:
    return backends.load(backend).label_margins(s, label, k, theta)


@_label_margins.register_fake
def _(s: Tensor, label: Tensor, k: int, theta: float, backend: str) -> tuple[Tensor, Tensor]:
    return s.new_empty(s.shape[0], dtype=torch.float64), torch.empty_like(s)


@torch.library.custom_op("topk_registry::margins", mutates_args=())
def margins(s: Tensor, k: int, theta: float, backend: str) -> Tensor:
    """The margins [B, n] of every class by the named implementation."""
    return backends.load(backend).margins(s, k, theta)


@margins.register_fake
def _(s: Tensor, k: int, theta: float, backend: str) -> Tensor:
    return torch.empty_like(s, dtype=torch.float64 if s.dtype == torch.float64 else torch.float32)


@torch.library.custom_op("topk_registry::margins_backward", mutates_args=())
def _margins_backward(g: Tensor, s: Tensor, k: int, theta: float, backend: str) -> Tensor:
    return backends.load(backend).margins_backward(g, s, k, theta)


@_margins_backward.register_fake
def _(g: Tensor, s: Tensor, k: int, theta: float, backend: str) -> Tensor:
    return torch.empty_like(s)


def _save_gradient(ctx, inputs, output) -> None:
    ctx.save_for_backward(output[1])


def _scale_gradient(ctx, g: Tensor, _):
    return scaled(g, ctx.saved_tensors[0]), None, None, None, None


def _save_scores(ctx, inputs, output) -> None:
    s, ctx.k, ctx.theta, ctx.backend = inputs
    ctx.save_for_backward(s)


def _margins_gradient(ctx, g: Tensor):
    (s,) = ctx.saved_tensors
    return _margins_backward(g.contiguous(), s, ctx.k, ctx.theta, ctx.backend), None, None, None


_label_margins.register_autograd(_scale_gradient, setup_context=_save_gradient)
margins.register_autograd(_margins_gradient, setup_context=_save_scores)


def label_margins(s: Tensor, label: Tensor, k: int, theta: float, backend: str) -> Tensor:
    """The margin [B] of each row's label by the named implementation."""
    return _label_margins(s, label, k, theta, backend)[0]


# the graph is compiled for one implementation: how it is chosen is not part of it
choose = torch.compiler.assume_constant_result(backends.choose)
