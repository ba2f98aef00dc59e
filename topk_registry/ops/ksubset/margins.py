"""Margins, log-odds and marginals: of every class, and of each row's label."""

from __future__ import annotations  # torch 2.8 cannot compile a function in a function that makes a union

from math import isfinite

import torch
from torch import Tensor

from topk_registry.ops.distributed import by_shards, is_distributed
from topk_registry.ops.hinge import Hinge
from topk_registry.ops.ksubset import custom_ops, fixed_graph
from topk_registry.ops.ksubset import old_autograd as autograd
from topk_registry.ops.ksubset.backends import OPERATOR
from topk_registry.ops.ksubset.request import check, check_finite, output_dtype, prepare
from topk_registry.ops.rows.autograd import Reduced
from topk_registry.ops.targets.checks import check_device, check_range
from topk_registry.ops.tensors import Route, route


def topk_margins(logits: Tensor, k: int, *, temperature: float = 1.0, impl: str = "auto") -> Tensor:
    """How far each class is inside the top-k set, in units of the scores: a smooth gap to the k-th best other class.

    margin_i = temperature * l_i(logits / temperature), with the log-odds l of :func:`topk_log_odds`. As the temperature
    goes to zero it becomes logits_i - (the k-th largest of the other logits), and it is finite for any temperature.

    Args:
        logits: scores [..., n]; -inf marks a class that cannot be chosen.
        k: size of the set, 1 <= k <= n - 1.
        temperature: a positive number.
        impl: ``"auto"``, or the name of an implementation.

    Returns:
        Margins [..., n], in single precision for half-precision logits, else in the dtype of the logits.

    Example:
        >>> topk_margins(torch.tensor([3.0, 2.0, 1.0]), 2, temperature=1e-6)
        tensor([ 2.0000,  1.0000, -1.0000])
    """
    return _margins(logits, k, temperature, impl).to(output_dtype(logits))


def topk_log_odds(logits: Tensor, k: int, *, impl: str = "auto") -> Tensor:
    """Log-odds of each class being in a random k-set that is drawn with probability proportional to prod exp(logits).

    l_i = x_i + log sigma_{k-1}(e without i) - log sigma_k(e without i), e = exp(x), with sigma_j the j-th elementary
    symmetric polynomial. Exact to rounding, differentiable for any cotangent; arguments as :func:`topk_margins`.

    Example:
        >>> topk_log_odds(torch.zeros(4), 1)
        tensor([-1.0986, -1.0986, -1.0986, -1.0986])

    Reference: Berrada, Zisserman, Kumar, *Smooth Loss Functions for Deep Top-k Classification*, ICLR 2018.
    """
    return topk_margins(logits, k, impl=impl)


def topk_marginals(logits: Tensor, k: int, *, temperature: float = 1.0, impl: str = "auto") -> Tensor:
    """Probability of each class to be in the top-k set: sigmoid of the log-odds of ``logits / temperature``.

    pi_i = e_i sigma_{k-1}(e without i) / sigma_k(e); they sum to k. For k = 1 this is softmax. Arguments as
    :func:`topk_margins`.

    Example:
        >>> topk_marginals(torch.tensor([2.0, 1.0, 0.0, -1.0]), 2).sum()
        tensor(2.0000)
    """
    return torch.sigmoid(_margins(logits, k, temperature, impl) / temperature).to(output_dtype(logits))


def topk_label_margins(
    logits: Tensor, label: Tensor, k: int, *, temperature: float = 1.0, impl: str = "auto"
) -> Tensor:
    """The entry of :func:`topk_margins` at each row's label, with a backward pass that costs one multiplication.

    Args:
        logits: scores [B, n].
        label: class indices [B], int64.
        k, temperature, impl: as in :func:`topk_margins`.

    Returns:
        Margins [B] in double precision.
    """
    return at_labels(logits, label, k, temperature, impl, None)


def at_labels(
    logits: Tensor, label: Tensor, k: int, temperature: float, impl: str, options: tuple[Tensor, float] | None
) -> Tensor:
    """The label's margin in double precision, or with ``options`` alpha and tau a hinge on a k-th of it."""
    check(logits, k, temperature)
    if label.dtype != torch.int64 or label.shape != logits.shape[:1] or logits.ndim != 2:
        raise ValueError(
            f"expected logits [B, n] and int64 labels [B], got {list(logits.shape)} and {label.dtype} "
            f"{list(label.shape)}"
        )
    check_device(logits, "label", label)
    if is_distributed(logits):
        return by_shards(lambda s, y: at_labels(s, y, k, temperature, impl, options), logits, label)
    s, size, theta, sign, backend = prepare(logits, k, temperature, impl)
    alpha, tau = options or (None, 0.0)
    if alpha is not None:
        alpha = alpha.to(s.device, output_dtype(s)).contiguous()

    def value(margin: Tensor) -> Tensor:
        return sign * margin if alpha is None else Hinge(alpha, sign / k, tau).definition(margin, label)[0]

    def operations(s: Tensor) -> Tensor:
        return value(fixed_graph.label_margins(s, label, size, theta))

    way = route(logits, label, alpha)
    if way is Route.OPERATIONS:
        return operations(s)
    if way is Route.GRAPH:
        return value(custom_ops.label_margins(s, label, size, theta, backend)[0])
    on_cpu = logits.device.type == "cpu"  # values are looked at there only: elsewhere that would stall the device
    if on_cpu and (alpha is not None or not OPERATOR[backend].checks_labels):  # of margins the kernel does
        check_range(label, logits.shape[1], name="label")

    def kernel(s: Tensor, wanted: bool) -> tuple[Tensor | None, ...]:
        kernels = OPERATOR[backend].kernels()
        hinge = None if alpha is None else Hinge(alpha, sign / k, tau)
        if hinge is not None and kernels.expected_hinges is not None:
            margin, gradient = kernels.expected_hinges(s, label, size, theta, hinge, None, 1.0)
            outputs = margin, gradient, None
        else:
            margin, gradient = kernels.label_margins(s, label, size, theta)
            of_margin = (sign * margin, margin.new_full((), sign)) if hinge is None else hinge.definition(margin, label)
            outputs = of_margin[0], gradient, of_margin[1]
        # with too few scores, or a label out of range, it is NaN; above n / 2 it may be anything
        if on_cpu and (sign < 0 or not isfinite(margin.sum())):
            check_range(label, s.shape[1], name="label")
            check_finite(sign * s, k)
        return outputs

    return Reduced.apply(s, kernel, operations)


def _margins(logits: Tensor, k: int, temperature: float, impl: str) -> Tensor:
    """Return margins in the precision of the computation: double-precision ones may exceed the range of single."""
    check(logits, k, temperature)
    if is_distributed(logits):
        return by_shards(lambda s: _margins(s, k, temperature, impl), logits)
    way = route(logits)
    if logits.device.type == "cpu" and way is Route.KERNELS:
        check_finite(logits.detach(), k)
    s, k, theta, sign, backend = prepare(logits, k, temperature, impl)
    if way is Route.OPERATIONS:
        rows = fixed_graph.margins(s, k, theta)
    elif way is Route.GRAPH:
        rows = custom_ops.margins(s, k, theta, backend)
    else:
        kernels = OPERATOR[backend].kernels()
        rows = autograd.Margins.apply(s, k, theta, kernels.margins, kernels.margins_backward)
    return (rows if sign > 0 else -rows).reshape(logits.shape)
