"""Check arguments, choose a backend, and call the k-subset operator.

Backends see rows [B, n] with 2k <= n (backends.py). Other shapes and dtypes, larger k and bad input are settled here.
"""

from __future__ import annotations  # torch 2.8 cannot compile a function in a function that makes a union

from math import inf, isfinite
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from topk_registry.ops.distributed import by_shards, class_dimension, is_distributed, whole
from topk_registry.ops.hinge import Hinge
from topk_registry.ops.ksubset import autograd, custom_ops, differentiable, soft_targets
from topk_registry.ops.ksubset.backends import OPERATOR
from topk_registry.ops.label_mixture import LabelMixture
from topk_registry.ops.tensors import Route, check_dense, route

# coefficients span e^k and margins grow with the temperature: both can be more than single precision holds
SINGLE, SINGLE_TEMPERATURE = 64, 1e30


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
    return _at_labels(logits, label, k, temperature, impl, None)


def smooth_topk_hinge(
    logits: Tensor,
    target: Tensor | LabelMixture,
    k: int,
    *,
    tau: float = 1.0,
    alpha: float | Tensor = 1.0,
    weight: Tensor | None = None,
    reduction: str = "none",
    impl: str = "auto",
    process_group: Any = None,
    num_classes: int | None = None,
) -> Tensor:
    """The smooth top-k SVM: a hinge, smoothed by tau, on the label's margin at the temperature k tau.

    L_y = tau softplus((alpha_y - margin_y / k) / tau), and L = sum_c q_c w_c L_c for a distribution q over labels. The
    forward pass also writes the gradient, so that the backward pass is at most one multiplication.

    Args:
        logits: scores [B, n].
        target: class indices [B] int64, a distribution [B, n], or a :class:`LabelMixture`.
        k, impl: as in :func:`topk_margins`.
        tau: smoothing temperature, positive.
        alpha: required gap, one for all classes or one a class [n]; it gets no gradient.
        weight: one factor a class [n]; it gets no gradient.
        reduction: ``"none"``, ``"sum"``, or ``"mean"``: over rows, for indices weighted as in
            ``torch.nn.CrossEntropyLoss``.
        process_group: ranks that the classes are spread over. Each gives its own columns of the logits of all rows:
            ceil(n / ranks) of them, the last ranks what is left. Labels and options of classes count the classes of
            all ranks; a distribution may be whole, or in columns as the logits. Ranks must call backward on the same
            losses.
        num_classes: n, checked against what the ranks of the group hold; None for their sum.

    Returns:
        Losses [B] or their sum or mean, in at least single precision.

    Example:
        >>> smooth_topk_hinge(torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([1]), 2, tau=1e-6)
        tensor([0.5000])
        >>> smooth_topk_hinge(torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([[0.0, 0.5, 0.5]]), 2, tau=1e-6)
        tensor([1.0000])

    Reference: Berrada, Zisserman, Kumar, *Smooth Loss Functions for Deep Top-k Classification*, ICLR 2018.
    """
    if process_group is not None:
        from topk_registry.ops.ksubset.chunked.parallel import sharded_hinge

        options = {"tau": tau, "alpha": alpha, "weight": weight, "reduction": reduction}
        return sharded_hinge(logits, target, k, **options, group=process_group, num_classes=num_classes)
    if not 0.0 < tau < inf:
        raise ValueError(f"tau must be positive and finite, got {tau!r}")
    check(logits, k, tau)
    k = _fixed(k)
    if not isinstance(alpha, Tensor):
        alpha = torch.full((), alpha, dtype=output_dtype(logits), device=logits.device)
    alpha, weight = whole(alpha.detach()), None if weight is None else whole(weight.detach())
    if alpha.shape not in ((), logits.shape[1:]):
        raise ValueError(f"alpha must be one number, or one a class {list(logits.shape[1:])}, got {list(alpha.shape)}")
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f"reduction must be 'none', 'sum' or 'mean', got {reduction!r}")
    spread = is_distributed(logits) and logits.ndim == 2 and class_dimension(logits) is not None
    plain = reduction == "none" and weight is None and not spread
    if plain and isinstance(target, Tensor) and not target.is_floating_point():
        return _at_labels(logits, target, k, k * tau, impl, (alpha, tau)).to(output_dtype(logits))
    options = soft_targets.Options(k, tau, alpha, weight, reduction, impl)
    return soft_targets.expected_hinge(logits, target, options)


def _at_labels(
    logits: Tensor, label: Tensor, k: int, temperature: float, impl: str, options: tuple[Tensor, float] | None
) -> Tensor:
    """The label's margin in double precision, or with ``options`` alpha and tau a hinge on a k-th of it."""
    check(logits, k, temperature)
    if label.dtype != torch.int64 or label.shape != logits.shape[:1] or logits.ndim != 2:
        raise ValueError(
            f"expected logits [B, n] and int64 labels [B], got {list(logits.shape)} and {label.dtype} "
            f"{list(label.shape)}"
        )
    if is_distributed(logits):
        return by_shards(lambda s, y: _at_labels(s, y, k, temperature, impl, options), logits, label)
    s, size, theta, sign, backend = prepare(logits, k, temperature, impl)
    alpha, tau = options or (None, 0.0)
    if alpha is not None:
        alpha = alpha.to(s.device, output_dtype(s)).contiguous()

    def value(margin: Tensor, label: Tensor, alpha: Tensor | None) -> Tensor:
        return sign * margin if alpha is None else Hinge(alpha, sign / k, tau).definition(margin, label)[0]

    def operations(s: Tensor, label: Tensor, alpha: Tensor | None) -> Tensor:
        return value(differentiable.label_margins(s, label, size, theta), label, alpha)

    way = route(logits, label, alpha)
    if way is Route.OPERATIONS:
        return operations(s, label, alpha)
    if way is Route.GRAPH:
        return value(custom_ops.label_margins(s, label, size, theta, backend)[0], label, alpha)
    on_cpu = logits.device.type == "cpu"  # values are looked at there only: elsewhere that would stall the device
    if on_cpu and not OPERATOR[backend].checks_labels:
        check_labels(label, logits.shape[1])

    def kernel(s: Tensor, label: Tensor, alpha: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        kernels = OPERATOR[backend].kernels()
        if alpha is None:
            margin, gradient = kernels.label_margins(s, label, size, theta)
            cost, slope = sign * margin, torch.full_like(margin, sign)
        else:
            hinge = Hinge(alpha, sign / k, tau)
            margin, gradient, cost, slope = kernels.label_hinges(s, label, size, theta, hinge)
        if on_cpu and not isfinite(margin.sum()):  # so with too few scores, or a label out of range
            check_labels(label, s.shape[1])
            _check_finite(sign * s, k)
        return cost, slope, gradient

    return autograd.LabelMargins.apply(s, label, alpha, kernel, operations)[0]


def _margins(logits: Tensor, k: int, temperature: float, impl: str) -> Tensor:
    """In the precision they are computed in: where that is double, they may be beyond the range of single."""
    check(logits, k, temperature)
    if is_distributed(logits):
        return by_shards(lambda s: _margins(s, k, temperature, impl), logits)
    way = route(logits)
    if logits.device.type == "cpu" and way is Route.KERNELS:
        _check_finite(logits.detach(), k)
    s, k, theta, sign, backend = prepare(logits, k, temperature, impl)
    if way is Route.OPERATIONS:
        rows = differentiable.margins(s, k, theta)
    elif way is Route.GRAPH:
        rows = custom_ops.margins(s, k, theta, backend)
    else:
        kernels = OPERATOR[backend].kernels()
        rows = autograd.Margins.apply(s, k, theta, kernels.margins, kernels.margins_backward)
    return (rows if sign > 0 else -rows).reshape(logits.shape)


def output_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def prepare(logits: Tensor, k: int, temperature: float, impl: str) -> tuple[Tensor, int, float, int, str]:
    """Rows to work on, with 2k <= n: drawing k classes by x is leaving out n - k by -x, so the log-odds change sign."""
    n = logits.shape[-1]
    sign = 1 if 2 * k <= n else -1
    k = _fixed(k if sign > 0 else n - k)
    double = logits.dtype == torch.float64 or k > SINGLE
    if (
        temperature > SINGLE_TEMPERATURE
    ):  # a branch, so that a compiled graph, where this is a symbol, has a constant below
        double = True
    backend = _choose(impl, logits.device, k, double)
    half = OPERATOR[backend].takes_half and logits.dtype in (torch.float16, torch.bfloat16)
    s = logits if half else logits.to(torch.float64 if double else torch.float32)
    s = s.reshape(-1, n)
    # below this the margins no longer depend on the temperature, but its reciprocal would overflow
    theta = max(float(temperature), 4 * torch.finfo(torch.float64 if double else torch.float32).tiny)
    s = s if sign > 0 else -s
    return s if OPERATOR[backend].takes_strides else s.contiguous(), k, theta, sign, backend


def _fixed(k: int) -> int:
    """A number, to choose implementations by: in a graph that was compiled for another k before, it is a symbol."""
    return len(range(k))


def _choose(impl: str, device: torch.device, k: int, double: bool) -> str:
    if not torch.compiler.is_compiling():
        return OPERATOR.choose(impl, device, k, double)
    from topk_registry.ops import constant  # it brings in the compiler

    return constant.choose(OPERATOR.name, impl, device, k, double)


def check(logits: Tensor, k: int, temperature: float) -> None:
    check_dense(logits, "logits")
    if not logits.is_floating_point() or logits.ndim < 1:
        raise ValueError(f"logits must be floating point [..., n], got {logits.dtype} {list(logits.shape)}")
    n = logits.shape[-1]
    if isinstance(k, bool) or not isinstance(k, Integral) or not 1 <= k < n:
        raise ValueError(f"k must be an integer from 1 to n - 1 = {n - 1}, got {k!r}")
    if not 0.0 < temperature < inf:
        raise ValueError(f"temperature must be positive and finite, got {temperature!r}")


def check_labels(label: Tensor, n: int) -> None:
    if label.numel():
        low, high = (int(bound) for bound in label.aminmax())
        if low < 0 or high >= n:
            raise ValueError(f"label must be in [0, {n - 1}], got {low if low < 0 else high}")


def _check_finite(logits: Tensor, k: int) -> None:
    """A row with too few scores is an error where it is seen, and NaN elsewhere."""
    if not logits.numel() or bool(logits.amin() > -torch.inf):
        return
    scores = (logits != -torch.inf).sum(-1)
    if bool((scores <= k).any()):
        raise ValueError(f"every row needs at least k + 1 = {k + 1} scores above -inf, one has {int(scores.min())}")
