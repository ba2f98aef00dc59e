"""Stateless functions of tensors: top-k marginals, and losses of logits.

A function named ``*_loss`` takes ``(logits, target)`` and returns a tensor. Losses are reduced as in
``torch.nn.functional``.
"""

from torch import Tensor

from topk_registry.losses.targets import Masses, Target, check_logits, check_reduction, check_target
from topk_registry.nn.linear import linear_smooth_topk
from topk_registry.ops.hinge import soft_hinge
from topk_registry.ops.ksubset import smooth_topk, topk_label_margins, topk_log_odds, topk_marginals, topk_margins
from topk_registry.ops.perturbed import perturbed_hinge, perturbed_topk

__all__ = [
    "linear_smooth_topk",
    "perturbed_hinge",
    "perturbed_topk",
    "smooth_topk",
    "smooth_topk_loss",
    "soft_hinge",
    "topk_label_margins",
    "topk_log_odds",
    "topk_marginals",
    "topk_margins",
]


def smooth_topk_loss(
    logits: Tensor,
    target: Target,
    k: int,
    *,
    tau: float = 0.1,
    alpha: float | Tensor = 1.0,
    weight: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Compute the smooth top-k SVM: a hinge on the margin of the label, smoothed with temperature tau.

    L_y = tau softplus((alpha_y - margin_y / k) / tau), where margins have the temperature k tau. For a distribution q
    over labels, L = sum_c q_c w_c L_c.

    Args:
        logits: scores [B, n].
        target: class indices [B], a distribution [B, n], or a :class:`topk_registry.LabelMixture`.
        k: size of the set, 1 <= k <= n - 1.
        tau: smoothing temperature, positive.
        alpha: required margin: one number, or one per class [n]. The margin gets no gradient.
        weight: one factor per class [n]. The weight gets no gradient.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``. For class indices, the mean is weighted as in
            ``torch.nn.CrossEntropyLoss``.

    Returns:
        Mean or sum of the losses, or the losses [B], in at least single precision.

    Example:
        >>> smooth_topk_loss(torch.tensor([[3.0, 2.0, 1.0], [1.0, 2.0, 3.0]]), torch.tensor([1, 1]), 2, tau=1e-6)
        tensor(0.5000)

    Reference: Berrada, Zisserman, Kumar, *Smooth Loss Functions for Deep Top-k Classification*, ICLR 2018.
    """
    check_reduction(reduction)
    check_logits(logits)
    ignores = check_target(logits, target)
    options = {"weight": weight, "reduction": reduction, "ignores": ignores, "dtype": logits.dtype}
    masses = Masses.of(target, logits.shape[1], **options)
    losses = smooth_topk(logits, masses, k=k, tau=tau, alpha=alpha)
    if reduction == "none":
        return losses
    return losses.sum() if len(losses) or reduction == "sum" else losses.mean()
