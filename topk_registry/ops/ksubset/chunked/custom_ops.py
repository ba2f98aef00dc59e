"""The margins of a linear layer's labels as operators that torch knows by name, for compiled and exported graphs."""

import torch
from torch import Tensor
from torch.nn import functional as F

from topk_registry.ops.ksubset.api import topk_label_margins
from topk_registry.ops.ksubset.chunked import shards
from topk_registry.ops.ksubset.chunked.layer import as_rows, problem
from topk_registry.ops.ksubset.torch.rows import top_group_size
from topk_registry.ops.ksubset.torch.state import State

_OPTIONS = "Tensor features, Tensor weight, Tensor? bias, Tensor label, int k, float temperature, int chunk"


@torch.library.custom_op(
    "topk_registry::linear_label_margins",
    mutates_args=(),
    schema=f"({_OPTIONS}, ScalarType dtype) -> (Tensor, Tensor, Tensor, Tensor)",
)
def label_margins(features, weight, bias, label, k, temperature, chunk, dtype):
    """The margins [B], and the state of the classes other than the label."""
    p = problem(features, len(weight), k, temperature, None, chunk, dtype)
    margin, (top, classes, P) = shards.label_margins(features, weight, bias, label, p)
    return margin, top, classes, P.contiguous()


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
    p = problem(features, len(weight), k, temperature, None, chunk, dtype)
    gradients = shards.label_gradients(g, State(top, classes, P), features, weight, bias, label, p, wanted)
    return [d for d in gradients if d is not None]


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
            gradients = iter(_differentiable_gradients(g, saved[3:], ctx.options, wanted))
        else:
            gradients = iter(label_margins_backward(g, *saved, *ctx.options, wanted))
        return *(next(gradients) if is_wanted else None for is_wanted in wanted), *(None,) * 5


def _differentiable_gradients(g, saved, options, wanted):
    """The wanted gradients by torch operations, on all logits at once."""
    (features, weight, bias, label), (k, temperature, _, dtype) = saved, options
    args = [t for t, is_wanted in zip((features, weight, bias), wanted, strict=True) if is_wanted]
    with torch.enable_grad(), torch.autocast(features.device.type, enabled=False):
        logits = F.linear(features.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
        margin = topk_label_margins(logits, label, k, temperature=temperature)
        return torch.autograd.grad(margin, args, g, create_graph=True)
