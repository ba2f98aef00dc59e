"""Top-k hinge losses: the label's score must be ahead of its k-th best rival by a required gap.

Write s_[j] for the j-th largest score of a row and s\\y for the scores without the label's. Top-k error is made when
(s\\y)_[k] exceeds s_y, so a hinge on that difference bounds it. The four losses here differ in what they compare
s_y with. Yang and Koyejo show which of them are consistent with top-k error.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from topk_plugins._margins import checked_gaps
from topk_registry import TopKLoss
from topk_registry.rows import RowLoss, topk_hinge_rows


class TopKSVM(TopKLoss):
    r"""Top-k multiclass SVM, the limit of the smooth top-k SVM at temperature 0.

    .. math:: L(s, y) = \max\bigl(\tfrac1k ((s_{\setminus y})_{[k]} - s_y) + \alpha_y,\; 0\bigr)

    Use when:
        You want the limit of ``smooth_topk_svm``, as a baseline or for a linear model.

    Avoid when:
        A deep network starts from random weights: the slope reaches two scores of a row, and accuracy stays at chance.

    Args:
        k: size of the set in which the label should be, 1 <= k < n.
        alpha: required gap, at least 0: the loss is 0 once the label is k times as far ahead. One number, or one for
            each class [n].
        weight, reduction, label_smoothing, ignore_index: as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> TopKSVM(k=1)(torch.tensor([[2.0, 1.5, 0.0]]), torch.tensor([0]))
        tensor(0.5000)

    Reference: Lapin, Hein, Schiele 2015, "Top-k Multiclass SVM"; in this scale Berrada, Zisserman, Kumar 2018, "Smooth
    Loss Functions for Deep Top-k Classification", equation 3.
    """

    option_ranges: ClassVar = {"alpha": "[0, inf)"}

    alpha: float | Tensor

    def __init__(
        self,
        k: int = 5,
        *,
        alpha: float | Tensor | Sequence[float] = 1.0,
        weight: Tensor | Sequence[float] | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
    ) -> None:
        super().__init__(
            k, weight=weight, reduction=reduction, label_smoothing=label_smoothing, ignore_index=ignore_index
        )
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

    takes_half = True

    def row_loss(self, logits: Tensor) -> RowLoss:
        return topk_hinge_rows(self.k, alpha=self._gaps(logits), factor=1 / self.k)

    def _gaps(self, logits: Tensor) -> float | Tensor:
        if not isinstance(self.alpha, Tensor):
            return self.alpha
        if len(self.alpha) != logits.shape[1]:
            raise ValueError(f"alpha has {len(self.alpha)} entries, logits have {logits.shape[1]} classes")
        return self.alpha

    def extra_repr(self) -> str:
        alpha = f"[{len(self.alpha)}]" if isinstance(self.alpha, Tensor) else f"{self.alpha:g}"
        return f"alpha={alpha}, {super().extra_repr()}"


class TopKHinge(TopKLoss):
    r"""Top-k hinge: the label must exceed its k-th best rival by 1.

    .. math:: L(s, y) = \bigl(1 + (s_{\setminus y})_{[k]} - s_y\bigr)_+

    Use when:
        You want a baseline, or start from trained weights.

    Avoid when:
        A deep network starts from random weights: the slope reaches two scores of a row, and training does not start.
        Take ``smooth_topk_svm``.

    Args:
        k: size of the set in which the label should be, 1 <= k < n.
        weight, reduction, label_smoothing, ignore_index: as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> TopKHinge(k=2)(torch.tensor([[2.0, 1.5, 0.0]]), torch.tensor([2]))
        tensor(2.5000)

    Reference: Lapin, Hein, Schiele 2015, "Top-k Multiclass SVM".
    """

    takes_half = True

    def row_loss(self, logits: Tensor) -> RowLoss:
        return topk_hinge_rows(self.k)


class TopKHingeConvex(TopKLoss):
    r"""Convex top-k hinge: the label must reach the mean of the k largest scores once every rival is raised by 1.

    .. math:: L(s, y) = \Bigl(\tfrac1k \sum_{j=1}^k (s + 1 - \mathbf{1}_y)_{[j]} - s_y\Bigr)_+

    The k largest of those are the k - 1 best rivals, raised, and the better of the k-th and the label.

    Use when:
        You want a convex top-k loss of a linear model, or a baseline.

    Avoid when:
        A deep network starts from random weights: the slope reaches few scores of a row. Take ``smooth_topk_svm``.

    Args:
        k: size of the set in which the label should be, 1 <= k < n.
        weight, reduction, label_smoothing, ignore_index: as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> TopKHingeConvex(k=2)(torch.tensor([[2.0, 1.5, 0.0]]), torch.tensor([2]))
        tensor(2.7500)

    Reference: Lapin, Hein, Schiele 2015, "Top-k Multiclass SVM", the loss called alpha.
    """

    takes_half = True

    def row_loss(self, logits: Tensor) -> RowLoss:
        return topk_hinge_rows(self.k, against="mean")


class TopKHingeCalibrated(TopKLoss):
    r"""Top-k calibrated hinge: the label must exceed the (k+1)-th of all scores by 1.

    .. math:: L(s, y) = \bigl(1 + s_{[k+1]} - s_y\bigr)_+

    Use when:
        You want the hinge whose minimiser ranks the true top k, on convex models or from trained weights.

    Avoid when:
        A deep network starts from random weights: the slope reaches two scores of a row. ``noised_topk`` is this loss,
        smoothed.

    Args:
        k: size of the set in which the label should be, 1 <= k < n.
        weight, reduction, label_smoothing, ignore_index: as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> TopKHingeCalibrated(k=2)(torch.tensor([[2.0, 1.5, 0.0]]), torch.tensor([1]))
        tensor(0.)

    Reference: Yang, Koyejo 2020, "On the Consistency of Top-k Surrogate Losses".
    """

    takes_half = True

    def row_loss(self, logits: Tensor) -> RowLoss:
        return topk_hinge_rows(self.k, against="rank")
