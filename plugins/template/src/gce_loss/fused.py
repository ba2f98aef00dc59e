"""The same loss as a curve of the label's probability, which one of the registry's compiled kernels computes."""

import math
from typing import Any

from torch import Tensor

from gce_loss import GeneralisedCrossEntropy
from topk_registry.rows import Curve, RowLoss, softmax_rows


def _curve(
    log_p: float, log_not_p: float, p: float, not_p: float, own: float, numbers: tuple[float, ...]
) -> tuple[float, float]:
    """The loss and its slope in the log-odds, for one class in plain floats: kernels are compiled from this."""
    x = numbers[0] * log_p
    return -math.expm1(x) * numbers[1], -math.exp(x) * not_p


class FusedGeneralisedCrossEntropy(GeneralisedCrossEntropy):
    """Generalised cross-entropy in one pass over the scores, on CPUs and GPUs.

    See :class:`gce_loss.GeneralisedCrossEntropy` for the formula and the options.
    """

    takes_half = True

    def __init__(self, *, q: float = 0.7, **options: Any) -> None:
        super().__init__(q=q, **options)

    def row_loss(self, logits: Tensor) -> RowLoss:
        return softmax_rows(Curve(self._definition_of_curve, _curve, (self.q, 1 / self.q)))

    def _definition_of_curve(self, log_p: Tensor, log_not_p: Tensor, own: Tensor | None) -> Tensor:
        # the same in torch operations, for devices, transforms and derivatives without a kernel
        return -(self.q * log_p).expm1() / self.q
