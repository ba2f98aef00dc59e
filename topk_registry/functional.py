"""Functions of tensors without state: top-k marginals, and losses of logits.

A function whose name ends in ``_loss`` takes ``(logits, target)`` and returns a tensor. The argument ``reduction`` has
the values of ``torch.nn.functional``: ``"mean"``, ``"sum"`` or ``"none"``.
"""

from torch import Tensor

from topk_registry.checks import choice
from topk_registry.nn.linear import linear_smooth_topk
from topk_registry.ops.backend import is_readable
from topk_registry.ops.ksubset import topk_label_margins, topk_log_odds, topk_marginals, topk_margins
from topk_registry.ops.ksubset.graph import soft_hinge
from topk_registry.ops.losses import perturbed_hinge, smooth_topk
from topk_registry.ops.masses import REDUCTIONS, Masses, Target
from topk_registry.ops.perturbed import perturbed_topk

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
    """Compute ``smooth_topk_svm``: a smooth hinge loss that becomes small once the label is in the top k classes.

        L_y = tau log(1 + exp(alpha_y / tau - l_y)),    l_y = log(pi_y / (1 - pi_y))

    The loss for the label y is weight_y L_y. Here pi_y is the top-k marginal of the label: the probability that a
    random set of k classes contains y, where a set has a probability proportional to exp(sum of its logits / (k tau)).
    If the target is a distribution q over labels, the loss of the sample is sum_c q_c weight_c L_c.

    Args:
        logits: tensor [B, n].
        target: class indices [B], a distribution [B, n], or a :class:`topk_registry.LabelMixture`. A sample with the
            index -100 has loss 0 and does not count in the mean.
        k: number of classes in each set, 1 <= k <= n - 1.
        tau: smoothing temperature, positive.
        alpha: required margin: one number, or one alpha_c per class [n]. No gradient with respect to alpha is computed.
        weight: one factor weight_c per class [n]. No gradient with respect to the weight is computed.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``. If the target has class indices, the mean is the sum divided by
            the sum of the weights of the labels, as in ``torch.nn.CrossEntropyLoss``.

    Returns:
        The mean or the sum as a scalar tensor, or the losses [B] for ``"none"``. The dtype is float32, or float64 for
        float64 logits.

    Example:
        >>> smooth_topk_loss(torch.tensor([[3.0, 2.0, 1.0], [1.0, 2.0, 3.0]]), torch.tensor([1, 1]), 2, tau=1e-6)
        tensor(0.5000)

    Reference: Berrada, Zisserman, Kumar, *Smooth Loss Functions for Deep Top-k Classification*, ICLR 2018.
    """
    choice(reduction, "reduction", REDUCTIONS)
    if isinstance(alpha, Tensor) and is_readable(alpha) and bool((alpha < 0).any()):
        raise ValueError(f"alpha must be at least 0, got {alpha.min().item():g}")
    masses = Masses.of(logits, target, weight=weight, reduction=reduction)
    losses = smooth_topk(logits, masses, k=k, tau=tau, alpha=alpha)
    if reduction == "none":
        return losses
    losses = masses.nan_without_rows(losses)
    return losses.sum() if len(losses) or reduction == "sum" else losses.mean()
