"""Generalised cross-entropy, between cross-entropy and mean absolute error, for noisy labels."""

import math
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from topk_registry import ClassificationLoss
from topk_registry.options import number
from topk_registry.rows import Curve, RowLoss, softmax_rows


def _generalised(log_p, log_not, p, not_p, own, numbers):
    x = numbers[0] * log_p
    return -math.expm1(x) * numbers[1], -math.exp(x) * not_p


class GeneralisedCrossEntropy(ClassificationLoss):
    r"""Cross-entropy whose logarithm is a power: samples that the network finds unlikely count less.

    .. math:: L(s, y) = \frac{1 - p_y^q}{q}, \qquad p = \mathrm{softmax}(s)

    Use when:
        Labels are wrong anywhere, and top-1 accuracy counts. ``q`` goes from cross-entropy (0) to a robust absolute
        error (1).

    Avoid when:
        Labels are clean or classes are many: near q = 1 unlikely labels hardly pull, and training is slow to start.

    Args:
        q: in (0, 1]; towards 0 it is cross-entropy, 1 is half of the absolute error of p.
        weight, reduction, label_smoothing, ignore_index: as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> GeneralisedCrossEntropy(q=1.0)(torch.zeros(1, 4), torch.tensor([0]))
        tensor(0.7500)

    Reference: Zhang, Sabuncu. Generalized Cross Entropy Loss for Training Deep Neural Networks with Noisy Labels.
    NeurIPS 2018.
    """

    option_ranges: ClassVar = {"q": "(0, 1]"}
    tuning_grid: ClassVar = {"q": (0.3, 0.5, 0.7)}
    takes_half = True

    def __init__(
        self,
        *,
        q: float = 0.7,
        weight: Tensor | Sequence[float] | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
    ) -> None:
        super().__init__(weight=weight, reduction=reduction, label_smoothing=label_smoothing, ignore_index=ignore_index)
        self.q = number(q, "q", above=0, at_most=1)

    def row_loss(self, logits: Tensor) -> RowLoss:
        return softmax_rows(Curve(self._loss, _generalised, (self.q, 1 / self.q)))

    def _loss(self, log_p: Tensor, log_not: Tensor, own: None) -> Tensor:
        return -(self.q * log_p).expm1() / self.q

    def extra_repr(self) -> str:
        return f"q={self.q:g}, {super().extra_repr()}"
