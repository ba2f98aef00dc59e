"""The smooth hinge on the margins of the k-subset operator, for targets of every kind."""

from __future__ import annotations  # torch 2.8 cannot compile a function in a function that makes a union

from typing import Any

import torch
from torch import Tensor

from topk_registry.ops.constant import fixed_number
from topk_registry.ops.distributed import class_dimension, is_distributed, whole
from topk_registry.ops.ksubset import soft_targets
from topk_registry.ops.ksubset.margins import at_labels
from topk_registry.ops.ksubset.request import check, fixed, output_dtype
from topk_registry.ops.targets.label_mixture import LabelMixture
from topk_registry.ops.targets.masses import Reduction
from topk_registry.ops.values import number


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
    tau = fixed_number(tau)
    number(tau, "tau", above=0)
    check(logits, k, tau)
    k = fixed(k)
    if not isinstance(alpha, Tensor):
        alpha = torch.full((), alpha, dtype=output_dtype(logits), device=logits.device)
    alpha, weight = whole(alpha.detach()), None if weight is None else whole(weight.detach())
    if alpha.shape not in ((), logits.shape[1:]):
        raise ValueError(f"alpha must be one number, or one a class {list(logits.shape[1:])}, got {list(alpha.shape)}")
    Reduction.of(reduction)
    spread = is_distributed(logits) and logits.ndim == 2 and class_dimension(logits) is not None
    plain = reduction == "none" and weight is None and not spread
    if plain and isinstance(target, Tensor) and not target.is_floating_point():
        return at_labels(logits, target, k, k * tau, impl, (alpha, tau)).to(output_dtype(logits))
    options = soft_targets.HingeOptions(k, tau, alpha, weight, reduction, impl)
    return soft_targets.expected_hinge(logits, target, options)
