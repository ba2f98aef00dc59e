"""Functions of tensors, without state: probabilities of being in the top-k set, and losses of logits.

A function called ``*_loss`` takes ``(logits, target)`` and returns numbers, reduced as in ``torch.nn.functional``.
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
    """Compute the smooth top-k SVM: a hinge, smoothed by tau, on the label's margin at the temperature k tau.

    L_y = tau softplus((alpha_y - margin_y / k) / tau), and L = sum_c q_c w_c L_c for a distribution q over labels.

    Args:
        logits: scores [B, n].
        target: class indices [B], a distribution [B, n], or a :class:`topk_registry.LabelMixture`.
        k: size of the set, 1 <= k <= n - 1.
        tau: smoothing temperature, positive.
        alpha: required gap, one for all classes or one per class [n]; it gets no gradient.
        weight: one factor per class [n]; it gets no gradient.
        reduction: ``"mean"`` over rows, for indices weighted as in ``torch.nn.CrossEntropyLoss``; ``"sum"`` or
            ``"none"``.

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
