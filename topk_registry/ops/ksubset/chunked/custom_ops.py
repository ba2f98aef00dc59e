"""A linear classifier and the k-subset operator over chunks of classes, as operators that torch knows by name.

The forward pass streams the state of each row over the chunks. The backward pass makes the scores of a chunk again,
turns them into their gradient in place, and multiplies that into the gradients of features, weight and bias. Beside
those the memory is that of a chunk, whatever the number of classes.
"""

from collections.abc import Iterable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from topk_registry.ops.ksubset.backends import OPERATOR
from topk_registry.ops.ksubset.margins import topk_label_margins
from topk_registry.ops.ksubset.request import prepare
from topk_registry.ops.ksubset.torch import state as streaming
from topk_registry.ops.ksubset.torch.rows import top_group_size
from topk_registry.ops.ksubset.torch.state import State, finish

LARGEST_K_ON_GPU = 11  # its kernels unroll powers of odds; the k best classes ask for k + 1


def as_rows(like: Tensor, n: int, k: int, temperature: float) -> tuple[Tensor, int, float, int]:
    """Prepare arguments for n scores of a dtype: no rows [0, n] to work in, k with 2k <= n, theta, the scores' sign."""
    return prepare(like.new_empty(0, n), k, temperature, "torch")[:4]


def kernels(like: Tensor, k: int) -> ModuleType:
    """Return the module whose ``summarise``, ``extend`` and ``gradient`` serve here."""
    return module_of(OPERATOR.choose("auto", like.device, k, like.dtype == torch.float64), k)


def module_of(backend: str, k: int) -> ModuleType:
    """Return the module of a backend for chunks of classes, or that of torch operations where it has none."""
    if backend == "torch" or (backend == "triton" and k > LARGEST_K_ON_GPU):
        return streaming
    return import_module(f"topk_registry.ops.ksubset.{backend}.chunks")


def score_chunks(
    x: Tensor, weight: Tensor, bias: Tensor | None, chunk: int, like: Tensor, sign: int = 1
) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """For each chunk its first class, its rows of the weight, and its scores [B, chunk], times sign: as the flat memory
    that ``streaming.put`` takes, and as the view of it. The memory is used again for the next one."""
    B, n = len(x), len(weight)
    memory = like.new_empty(B * min(chunk, n) + 1)
    for first in range(0, n, chunk):
        W = weight[first : first + chunk].to(x.dtype)
        b = None if bias is None else bias[first : first + chunk].to(x.dtype)
        flat = memory[: B * len(W) + 1]
        s = flat[:-1].view(B, len(W))
        _multiply(x, W.T, out=s, bias=b)
        yield first, W, flat, s.neg_() if sign < 0 else s


def _multiply(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
    """out = a b + bias, in one pass where the product has the dtype of its place."""
    if a.dtype != out.dtype:
        out.copy_(F.linear(a, b.T, bias))
    elif bias is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(bias, a, b, out=out)


def label_state(
    chunks: Iterable[tuple[int, Any, Tensor, Tensor]], label: Tensor, k: int, theta: float, like: Tensor
) -> tuple[State | None, Tensor]:
    """The state of the classes of all chunks other than the label [B], and the label's score [B].

    The state is None where there is no chunk. The score is NaN where the label is none of the classes.
    """
    state = score = None
    n = 0
    for first, _, flat, s in chunks:
        state, score = kernels(like, k).extend(state, score, s, label, k, theta, first, flat)
        n += s.shape[1]
    if state is None or score is None:
        return None, like.new_full((len(label),), torch.nan)
    return State(state.top[:, :n], state.classes[:, :n], state.P), score


class Gradients:
    """Gradients of features, weight and bias, added up over chunks from the gradients of their scores."""

    def __init__(self, features: Tensor, weight: Tensor, bias: Tensor | None, like: Tensor, wanted: list[bool]):
        self.dtype, self.wanted = features.dtype, wanted
        self.sums = like.new_zeros(features.shape if wanted[0] else ())
        self.weight = torch.empty_like(weight) if wanted[1] else None
        self.bias = torch.empty_like(bias) if wanted[2] and bias is not None else None

    def add(self, first: int, ds: Tensor, x: Tensor, W: Tensor) -> None:
        """Add the chunk that starts with the class ``first``: ds [B, m] for features x [B, d] and rows W [m, d]."""
        if self.wanted[0]:
            self.sums += ds @ W
        if self.weight is not None:
            _multiply(ds.T, x, out=self.weight[first : first + len(W)])
        if self.bias is not None:
            self.bias[first : first + len(W)] = ds.sum(0)

    def all(self) -> list[Tensor | None]:
        return [self.sums.to(self.dtype) if self.wanted[0] else None, self.weight, self.bias]


_OPTIONS = "Tensor features, Tensor weight, Tensor? bias, Tensor label, int k, float temperature, int chunk"


@torch.library.custom_op(
    "topk_registry::linear_label_margins",
    mutates_args=(),
    schema=f"({_OPTIONS}, ScalarType dtype) -> (Tensor, Tensor, Tensor, Tensor)",
)
def label_margins(features, weight, bias, label, k, temperature, chunk, dtype):
    """The margins [B], and the state of the classes other than the label."""
    like, k, theta, sign = as_rows(features, len(weight), k, temperature)
    with torch.autocast(features.device.type, enabled=False):
        chunks = score_chunks(features.to(dtype), weight, bias, chunk, like, sign)
        state, score = label_state(chunks, label, k, theta, like)
    assert state is not None
    top, classes, P = state
    top, classes, P = top.contiguous(), classes.contiguous(), P.double().contiguous()
    f = finish(State(top, classes, P), theta)
    return sign * (score.double() - f.a.double() + f.shift), top, classes, P


@label_margins.register_fake
def _(features, weight, bias, label, k, temperature, chunk, dtype):
    like, k, _, _ = as_rows(features, len(weight), k, temperature)
    B, T = len(label), min(top_group_size(k), len(weight))
    double = features.new_empty(B, dtype=torch.float64)
    return double, like.new_empty(B, T), label.new_empty(B, T), double.new_empty(k, B)


@torch.library.custom_op(
    "topk_registry::linear_label_margins_backward",
    mutates_args=(),
    schema=f"(Tensor g, Tensor top, Tensor classes, Tensor P, {_OPTIONS}, ScalarType dtype, bool[] wanted) -> Tensor[]",
)
def label_margins_backward(g, top, classes, P, features, weight, bias, label, k, temperature, chunk, dtype, wanted):
    """Return the wanted gradients of features, weight and bias."""
    like, k, theta, sign = as_rows(features, len(weight), k, temperature)
    f, g = finish(State(top, classes, P), theta), g.to(like)
    x, found = features.to(dtype), Gradients(features, weight, bias, like, wanted)
    with torch.autocast(features.device.type, enabled=False):
        for first, W, flat, s in score_chunks(x, weight, bias, chunk, like, sign):
            # the margin of -s is minus that of s: its gradient to the scores is the same
            ds = kernels(like, k).gradient(s, label, f, theta, g, first, flat).to(dtype)
            found.add(first, ds, x, W)
    return [d for d in found.all() if d is not None]


@label_margins_backward.register_fake
def _(g, top, classes, P, features, weight, bias, label, k, temperature, chunk, dtype, wanted):
    return [torch.empty_like(t) for t, is_wanted in zip((features, weight, bias), wanted, strict=True) if is_wanted]


class LinearLabelMargins(torch.autograd.Function):
    """:func:`label_margins` with its gradients; the other outputs are there to be kept."""

    @staticmethod
    def forward(features, weight, bias, label, k, temperature, chunk, dtype):
        return label_margins(features, weight, bias, label, k, temperature, chunk, dtype)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        features, weight, bias, label, *ctx.options = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output, features, weight, bias, label)

    @staticmethod
    def backward(ctx, g: Tensor, *_):
        wanted = list(ctx.needs_input_grad[:3])
        if g is None or not any(wanted):
            return (None,) * 8
        _, *saved = ctx.saved_tensors
        if torch.is_grad_enabled():
            found = iter(_differentiable_gradients(g, saved[3:], ctx.options, wanted))
        else:
            found = iter(label_margins_backward(g, *saved, *ctx.options, wanted))
        return *(next(found) if is_wanted else None for is_wanted in wanted), *(None,) * 5


def _differentiable_gradients(g, saved, options, wanted):
    """The wanted gradients by torch operations, on all logits at once."""
    (features, weight, bias, label), (k, temperature, _, dtype) = saved, options
    args = [t for t, is_wanted in zip((features, weight, bias), wanted, strict=True) if is_wanted]
    with torch.enable_grad(), torch.autocast(features.device.type, enabled=False):
        logits = F.linear(features.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
        margin = topk_label_margins(logits, label, k, temperature=temperature)
        return torch.autograd.grad(margin, args, g, create_graph=True)
