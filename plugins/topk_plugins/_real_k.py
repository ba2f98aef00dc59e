"""What losses share whose k may be any real number between 0 and the number of classes."""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from topk_registry import ClassificationLoss
from topk_registry.options import number


class RealK(ClassificationLoss):
    """Base of losses with a real k, 0 < k < n, and a temperature; a subclass defines ``row_loss``."""

    option_ranges: ClassVar = {"k": "(0, n)", "tau": "(0, inf)"}
    tuning_grid: ClassVar = {"tau": (0.3, 1.0, 3.0)}
    takes_half = True

    def __init__(
        self,
        k: float = 5,
        *,
        tau: float = 1.0,
        weight: Tensor | Sequence[float] | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
    ) -> None:
        super().__init__(weight=weight, reduction=reduction, label_smoothing=label_smoothing, ignore_index=ignore_index)
        self.k, self.tau = number(k, "k", above=0), number(tau, "tau", above=0)

    def check_classes(self, n: int) -> None:
        if self.k >= n:
            raise ValueError(f"k must be below the number of classes: k = {self.k:g}, logits have {n}")

    def extra_repr(self) -> str:
        return f"k={self.k:g}, tau={self.tau:g}, {super().extra_repr()}"
