r"""Top-k hinge losses: the label's score must exceed the k-th best other score by a required margin.

s_[j] is the j-th largest score of a row, and s\y are the scores without the label's. A top-k error occurs if (s\y)_[k]
exceeds s_y, so a hinge on that difference is an upper bound. The four losses of this module compare s_y with different
scores. Yang and Koyejo show which of the four losses are consistent with top-k error.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from topk_plugins._margins import checked_gaps
from topk_plugins._rows import at_labels, nan_if_invalid
from topk_registry import CommonOptions, TopKLoss


class TopKSVM(TopKLoss):
    r"""Top-k multiclass SVM: the limit of the smooth top-k SVM at temperature 0.

    .. math:: L(s, y) = \max\bigl(\tfrac1k ((s_{\setminus y})_{[k]} - s_y) + \alpha_y,\; 0\bigr)

    Use when:
        You want the limit of ``smooth_topk_svm``, as a baseline or for a linear model.

    Avoid when:
        A deep network starts from random weights: the gradient reaches two scores per row, and accuracy stays at 1 / n.

    Args:
        k: size of the set in which the label should be, 1 <= k < n.
        alpha: required margin, at least 0: one number, or one per class [n]. The loss is 0 once the score of the label
            exceeds the k-th best other score by k alpha.
        common: weight, reduction, label_smoothing, ignore_index, as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> TopKSVM(k=1)(torch.tensor([[2.0, 1.5, 0.0]]), torch.tensor([0]))
        tensor(0.5000)

    Reference: Lapin, Hein, Schiele 2015, "Top-k Multiclass SVM". The factor 1/k is as in Berrada, Zisserman, Kumar
    2018, "Smooth Loss Functions for Deep Top-k Classification", equation 3.
    """

    option_ranges: ClassVar = {"alpha": "[0, inf)"}

    alpha: float | Tensor

    def __init__(
        self,
        k: int = 5,
        *,
        alpha: float | Tensor | Sequence[float] = 1.0,
        **common: Unpack[CommonOptions],
    ) -> None:
        super().__init__(k, **common)
        self._take_alpha(alpha)

    def _take_alpha(self, alpha: float | Tensor | Sequence[float]) -> None:
        gaps = checked_gaps(alpha)
        for holder in (vars(self), self._buffers):
            holder.pop("alpha", None)
        if gaps.ndim:
            self.register_buffer("alpha", gaps)
        else:
            vars(self)["alpha"] = gaps.item()

    def set_option(self, name: str, value: Any) -> None:
        if name == "alpha":
            self._take_alpha(value)
        else:
            super().set_option(name, value)

    def per_label(self, logits: Tensor, labels: Tensor) -> Tensor:
        gap = self._gaps(logits)
        lead = _lead_of_rival(logits, labels, self.k) / self.k
        return (lead + (gap[labels] if isinstance(gap, Tensor) else gap)).clamp(min=0)

    def per_class(self, logits: Tensor) -> Tensor:
        lead = (_best_rival(logits, self.k) - logits) / self.k
        return nan_if_invalid((lead + self._gaps(logits)).clamp(min=0), logits)

    def _gaps(self, logits: Tensor) -> float | Tensor:
        if not isinstance(self.alpha, Tensor):
            return self.alpha
        if len(self.alpha) != logits.shape[1]:
            raise ValueError(f"alpha has {len(self.alpha)} entries, logits have {logits.shape[1]} classes")
        return self.alpha.to(logits)

    def extra_repr(self) -> str:
        alpha = f"[{len(self.alpha)}]" if isinstance(self.alpha, Tensor) else f"{self.alpha:g}"
        return f"alpha={alpha}, {super().extra_repr()}"


class TopKHinge(TopKLoss):
    r"""Top-k hinge: the score of the label must exceed the k-th best other score by 1.

    .. math:: L(s, y) = \bigl(1 + (s_{\setminus y})_{[k]} - s_y\bigr)_+

    Use when:
        You want a baseline, or you start from trained weights.

    Avoid when:
        A deep network starts from random weights: the gradient reaches two scores per row, and training does not start.
        Use ``smooth_topk_svm``.

    Args:
        k: size of the set in which the label should be, 1 <= k < n.
        common: weight, reduction, label_smoothing, ignore_index, as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> TopKHinge(k=2)(torch.tensor([[2.0, 1.5, 0.0]]), torch.tensor([2]))
        tensor(2.5000)

    Reference: Lapin, Hein, Schiele 2015, "Top-k Multiclass SVM".
    """

    def per_label(self, logits: Tensor, labels: Tensor) -> Tensor:
        return (1 + _lead_of_rival(logits, labels, self.k)).clamp(min=0)

    def per_class(self, logits: Tensor) -> Tensor:
        return nan_if_invalid((1 + _best_rival(logits, self.k) - logits).clamp(min=0), logits)


class TopKHingeConvex(TopKLoss):
    r"""Convex top-k hinge: the label must reach the mean of the k largest scores, with 1 added to all other scores.

    .. math:: L(s, y) = \Bigl(\tfrac1k \sum_{j=1}^k (s + 1 - \mathbf{1}_y)_{[j]} - s_y\Bigr)_+

    The mean has k terms: the k - 1 best other scores, each plus 1, and a last term. The last term is the k-th best
    other score plus 1, or the label's score if that is larger.

    Use when:
        You want a convex top-k loss for a linear model, or a baseline.

    Avoid when:
        A deep network starts from random weights: the gradient reaches few scores per row. Use ``smooth_topk_svm``.

    Args:
        k: size of the set in which the label should be, 1 <= k < n.
        common: weight, reduction, label_smoothing, ignore_index, as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> TopKHingeConvex(k=2)(torch.tensor([[2.0, 1.5, 0.0]]), torch.tensor([2]))
        tensor(2.7500)

    Reference: Lapin, Hein, Schiele 2015, "Top-k Multiclass SVM", the loss called alpha.
    """

    def per_label(self, logits: Tensor, labels: Tensor) -> Tensor:
        rivals = logits.scatter(1, labels[:, None], -torch.inf).topk(self.k, dim=1).values  # [B, k]
        losses = self._hinge(rivals[:, :-1].sum(1), rivals[:, -1], at_labels(logits, labels))
        return nan_if_invalid(losses, logits)

    def per_class(self, logits: Tensor) -> Tensor:
        top, index = _ranked(logits, self.k)
        is_top = torch.zeros_like(logits, dtype=torch.bool).scatter(1, index[:, :-1], True)
        better = torch.where(is_top, top[:, : self.k].sum(1, True) - logits, top[:, : self.k - 1].sum(1, True))
        losses = self._hinge(better, torch.where(is_top, top[:, -1:], top[:, -2:-1]), logits)
        return nan_if_invalid(losses, logits)

    def _hinge(self, better: Tensor, last: Tensor, score: Tensor) -> Tensor:
        """Return the loss from the sum of the k - 1 best other scores, the k-th best other score and the label's."""
        return ((better + self.k - 1 + torch.maximum(last + 1, score)) / self.k - score).clamp(min=0)


class TopKHingeCalibrated(TopKLoss):
    r"""Top-k calibrated hinge: the score of the label must exceed the (k+1)-th largest of all scores by 1.

    .. math:: L(s, y) = \bigl(1 + s_{[k+1]} - s_y\bigr)_+

    Use when:
        You want the hinge whose minimizer ranks the true top k, for linear models or from trained weights.

    Avoid when:
        A deep network starts from random weights: the gradient reaches two scores per row. ``noised_topk`` is the
        smoothed version.

    Args:
        k: size of the set in which the label should be, 1 <= k < n.
        common: weight, reduction, label_smoothing, ignore_index, as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> TopKHingeCalibrated(k=2)(torch.tensor([[2.0, 1.5, 0.0]]), torch.tensor([1]))
        tensor(0.)

    Reference: Yang, Koyejo 2020, "On the Consistency of Top-k Surrogate Losses".
    """

    def per_label(self, logits: Tensor, labels: Tensor) -> Tensor:
        threshold = _ranked(logits, self.k)[0][:, -1]
        return nan_if_invalid((1 + threshold - at_labels(logits, labels)).clamp(min=0), logits)

    def per_class(self, logits: Tensor) -> Tensor:
        return nan_if_invalid((1 + _ranked(logits, self.k)[0][:, -1:] - logits).clamp(min=0), logits)


def _ranked(s: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k + 1 largest scores and their classes, both [B, k + 1]. In rows with a NaN, all scores are NaN."""
    top, index = s.topk(k + 1, dim=1)
    return torch.where(top[:, :1].isnan(), torch.nan, top), index


def _best_rival(s: Tensor, k: int) -> Tensor:
    """Return for each class c the k-th largest score without c [B, n]: s_[k+1] for the top k classes, else s_[k].

    Ties are broken as in ``torch.topk``, so that the gradient reaches one class only.
    """
    top, index = _ranked(s, k)
    is_top = torch.zeros_like(s, dtype=torch.bool).scatter(1, index[:, :k], True)
    return torch.where(is_top, top[:, k:], top[:, k - 1 : k])


def _lead_of_rival(s: Tensor, labels: Tensor, k: int) -> Tensor:
    """Return (s without y)_[k] - s_y [B]. One gather reads both scores, so only one gradient has the size of s."""
    top, index = _ranked(s.detach(), k)
    is_top = (index[:, :k] == labels[:, None]).any(1)
    rival = torch.where(is_top, index[:, k], index[:, k - 1])
    both = s.gather(1, torch.stack([rival, labels], 1))  # [B, 2]
    lead = both[:, 0] - both[:, 1]
    return nan_if_invalid(torch.where(top[:, 0].isnan(), torch.nan, lead), s)
