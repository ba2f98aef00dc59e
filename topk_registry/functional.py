"""Functions of tensors, without state: probabilities of being in the top-k set, and losses of logits.

A function called ``*_loss`` takes ``(logits, target)`` and returns numbers, reduced as in ``torch.nn.functional``.
"""

from typing import Any

from torch import Tensor

from topk_registry.nn.linear import linear_smooth_topk
from topk_registry.ops.hinge import soft_hinge
from topk_registry.ops.ksubset import smooth_topk_hinge as _smooth_topk_hinge
from topk_registry.ops.ksubset import topk_label_margins, topk_log_odds, topk_marginals, topk_margins
from topk_registry.ops.perturbed import perturbed_topk
from topk_registry.ops.targets.label_mixture import LabelMixture

__all__ = [
    "linear_smooth_topk",
    "perturbed_topk",
    "smooth_topk_loss",
    "soft_hinge",
    "topk_label_margins",
    "topk_log_odds",
    "topk_marginals",
    "topk_margins",
]


def smooth_topk_loss(
    logits: Tensor,
    target: Tensor | LabelMixture,
    k: int,
    *,
    tau: float = 0.1,
    alpha: float | Tensor = 1.0,
    weight: Tensor | None = None,
    reduction: str = "mean",
    impl: str = "auto",
    process_group: Any = None,
    num_classes: int | None = None,
) -> Tensor:
    """Compute the smooth top-k SVM: a hinge, smoothed by tau, on the label's margin at the temperature k tau.

    L_y = tau softplus((alpha_y - margin_y / k) / tau), and L = sum_c q_c w_c L_c for a distribution q over labels.

    Args:
        logits: scores [B, n].
        target: class indices [B] int64, a distribution [B, n], or a :class:`topk_registry.LabelMixture`.
        k: size of the set, 1 <= k <= n - 1.
        tau: smoothing temperature, positive.
        alpha: required gap, one for all classes or one a class [n]; it gets no gradient.
        weight: one factor a class [n]; it gets no gradient.
        reduction: ``"mean"`` over rows, for indices weighted as in ``torch.nn.CrossEntropyLoss``; ``"sum"`` or
            ``"none"``.
        impl: the backend, ``"auto"`` for the fastest that serves.
        process_group: ranks that the classes are spread over. Each gives its own columns of the logits of all rows:
            ceil(n / ranks) of them, the last ranks what is left. Labels and options of classes count the classes of
            all ranks; a distribution may be whole, or in columns as the logits. Ranks must call backward on the same
            losses.
        num_classes: n, checked against what the ranks of the group hold; None for their sum.

    Returns:
        Mean or sum of the losses, or the losses [B], in at least single precision.

    Example:
        >>> smooth_topk_loss(torch.tensor([[3.0, 2.0, 1.0], [1.0, 2.0, 3.0]]), torch.tensor([1, 1]), 2, tau=1e-6)
        tensor(0.5000)

    Reference: Berrada, Zisserman, Kumar, *Smooth Loss Functions for Deep Top-k Classification*, ICLR 2018.
    """
    return _smooth_topk_hinge(
        logits,
        target,
        k,
        tau=tau,
        alpha=alpha,
        weight=weight,
        reduction=reduction,
        impl=impl,
        process_group=process_group,
        num_classes=num_classes,
    )
