"""The smooth top-k SVM on targets of every kind, from the logits to the reduced loss in one node.

A backend may bring a kernel of its own for the rows,

    expected_hinges(s [B, n], target, k, theta, hinge, weight [n] or None, factor) -> (value [B], gradient [B, n]),

value = factor * sum_c q_c w_c L_c, for a target that is labels [B], a distribution [B, n] or a :class:`LabelMixture`.
``torch/expected.py`` makes one of a backend's other functions.
"""

from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor

from topk_registry.ops.distributed import by_class_shards, by_shards, class_dimension, is_distributed
from topk_registry.ops.hinge import Hinge, soft_hinge
from topk_registry.ops.ksubset.backends import OPERATOR
from topk_registry.ops.ksubset.margins import topk_margins
from topk_registry.ops.ksubset.request import check_finite, output_dtype, prepare
from topk_registry.ops.ksubset.torch.expected import expected_hinges
from topk_registry.ops.rows.autograd import Reduced
from topk_registry.ops.targets.checks import check_logits, check_target
from topk_registry.ops.targets.label_mixture import LabelMixture
from topk_registry.ops.targets.masses import Masses
from topk_registry.ops.targets.table import expected
from topk_registry.ops.tensors import Route, route


class HingeOptions(NamedTuple):
    """The options of ``smooth_topk_hinge``, checked."""

    k: int
    tau: float
    alpha: Tensor  # [] or [n]
    weight: Tensor | None  # [n]
    reduction: str
    impl: str


def expected_hinge(logits: Tensor, target: Tensor | LabelMixture, options: HingeOptions) -> Tensor:
    """The loss of each row [B], or their sum or mean."""
    k, tau, alpha, weight, reduction, impl = options
    check_logits(logits)
    check_target(logits, target, ignore_index=None, integers=(torch.int64,))
    if weight is not None and weight.shape != logits.shape[1:]:
        raise ValueError(f"weight must be one factor a class {list(logits.shape[1:])}, got {list(weight.shape)}")
    if is_distributed(logits):
        return _by_shards(logits, target, options)
    dtype, theta = output_dtype(logits), k * tau
    alpha = alpha.to(logits.device, dtype).contiguous()
    weight = None if weight is None else weight.detach().to(logits.device, dtype).contiguous()
    masses = Masses.of(target, logits.shape[1], weight=weight, ignore_index=None, dtype=dtype)
    target, factor = masses.folded(reduction)
    total = reduction != "none"
    if reduction == "mean" and not len(logits):
        return expected_hinge(logits, target, options._replace(reduction="none")).mean()  # NaN, as in cross-entropy
    by_autograd = isinstance(target, Tensor) and target.requires_grad
    s, size, theta, sign, backend = prepare(logits, k, theta, impl)
    options = options._replace(alpha=alpha, weight=weight)
    mixture = isinstance(target, LabelMixture)
    parts = target if mixture else (target, None, None)
    if route(logits, alpha, weight, *parts) is not Route.KERNELS or by_autograd or (sign < 0 and s.is_cuda):
        # in a graph margins are one node; a target's own gradient is the table of all losses; above n / 2 the kernels
        # for GPUs were not tried
        return _by_table(logits, target, options, factor, total)
    precise = torch.promote_types(s.dtype, torch.float32)  # double for a large k, whatever the logits
    alpha, weight = alpha.to(precise), None if weight is None else weight.to(precise)
    kernels = OPERATOR[backend].kernels()
    of_rows = kernels.expected_hinges if sign > 0 else None
    on_cpu = logits.device.type == "cpu"  # elsewhere a look at numbers would stall the device

    def kernel(s: Tensor, wanted: bool) -> tuple[Tensor, Tensor]:
        args = s, target, size, theta, Hinge(alpha, sign / k, tau), weight, factor
        value, gradient = of_rows(*args) if of_rows else expected_hinges(kernels, *args)
        if on_cpu and (sign < 0 or not isfinite(value.sum())):  # above n / 2 a row with too few scores may cost nothing
            check_finite(sign * s, k)
        return value.sum() if total else value, gradient

    def definition(s: Tensor) -> Tensor:  # of the scores that the kernel sees
        return _by_table(s if sign > 0 else -s, target, options, factor, total)

    return Reduced.apply(s, kernel, definition).to(dtype)


def _by_shards(logits: Tensor, target: Tensor | LabelMixture, options: HingeOptions) -> Tensor:
    mixture = isinstance(target, LabelMixture)

    def losses(s: Tensor, *parts: Any) -> Tensor:
        return expected_hinge(s, LabelMixture(*parts) if mixture else parts[0], options._replace(reduction="none"))

    def of_classes(group: Any, s: Tensor, *parts: Any) -> Tensor:
        from topk_registry.ops.ksubset.chunked.parallel import sharded_hinge

        own = LabelMixture(*parts) if mixture else parts[0]
        k, tau, alpha, weight, *_ = options
        return sharded_hinge(
            s, own, k, tau=tau, alpha=alpha, weight=weight, reduction="none", group=group, num_classes=logits.shape[1]
        )

    parts, dimension = target if mixture else (target,), class_dimension(logits)
    if dimension is None:
        value = by_shards(losses, logits, *parts)
    else:
        value = by_class_shards(of_classes, logits, dimension, *parts, cut=not mixture and target.is_floating_point())
    masses = Masses.of(target, logits.shape[1], weight=options.weight, ignore_index=None)
    return masses.reduced(value, options.reduction)


def _by_table(
    logits: Tensor, target: Tensor | LabelMixture, options: HingeOptions, factor: float, total: bool
) -> Tensor:
    """Compute the loss by differentiable operations on the margins of every class."""
    k, tau, alpha, weight, _, impl = options
    margins = topk_margins(logits, k, temperature=k * tau, impl=impl)
    table = soft_hinge(alpha - margins / k, tau) * factor
    table = table if weight is None else table * weight
    if isinstance(target, Tensor) and not target.is_floating_point():
        value = table.gather(1, target[:, None])[:, 0]
    else:
        q = target.dense(logits.shape[1], table.dtype) if isinstance(target, LabelMixture) else target.to(table)
        value = expected(q, table)
    return value.sum() if total else value
