"""The smooth hinge of soft targets by a backend's margins.

:func:`expected_hinges` serves a backend that brings no kernel of its own for them.
"""

from typing import Any

import torch
from torch import Tensor

from topk_registry.ops.hinge import Hinge, invertible, soft_hinge
from topk_registry.ops.targets.label_mixture import LabelMixture


def expected_hinges(
    kernels: Any, s: Tensor, target: Tensor | LabelMixture, k: int, theta: float, hinge: Hinge,
    weight: Tensor | None, factor: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Value [B] and gradient [B, n] by a backend's margins: of the few labels of a row, or of every class."""
    if isinstance(target, Tensor) and not target.is_floating_point():
        target = LabelMixture(target[:, None], hinge.alpha.new_ones(()).expand(len(target), 1))
    if isinstance(target, LabelMixture) and target.uniform is None:
        return _at_few_labels(kernels, s, target, k, theta, hinge, weight, factor)
    q = target.dense(s.shape[1], hinge.alpha.dtype) if isinstance(target, LabelMixture) else target.to(hinge.alpha)
    q = q * factor if weight is None else q * (weight * factor)
    violation = hinge.alpha - hinge.scale * kernels.margins(s, k, theta)
    table = soft_hinge(violation, hinge.tau)
    slope = torch.sigmoid(violation.div_(invertible(hinge.tau, hinge.alpha.dtype))).mul_(-hinge.scale)
    # 0 * inf is NaN: a class of no mass costs nothing
    value = (q * table.masked_fill_((q == 0) & table.isinf(), 0.0)).sum(-1)
    return value, kernels.margins_backward(slope.mul_(q), s, k, theta)


def _at_few_labels(
    kernels: Any, s: Tensor, target: LabelMixture, k: int, theta: float, hinge: Hinge,
    weight: Tensor | None, factor: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    value, gradient = hinge.alpha.new_zeros(len(s)), None
    for label, share in zip(target.labels.unbind(1), target.shares.unbind(1), strict=True):
        share = share.to(hinge.alpha) * (factor if weight is None else weight[label] * factor)
        margin, of_margin = kernels.label_margins(s, label, k, theta)
        cost, slope = hinge.definition(margin, label)
        of_margin = of_margin.mul_((slope * share).to(of_margin)[:, None])
        value += (cost * share).masked_fill_((share == 0) & cost.isinf(), 0.0)
        gradient = of_margin if gradient is None else gradient.add_(of_margin)
    return value, torch.zeros_like(s) if gradient is None else gradient
