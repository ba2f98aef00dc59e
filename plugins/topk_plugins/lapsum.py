r"""LapSum: a soft top-k whose weights are distribution functions of the Laplace law.

    p_i = F((s_i - b) / tau),  F(u) = e^u / 2 for u <= 0, else 1 - e^{-u} / 2,  with b such that sum_i p_i = k.

Between two neighbouring scores the sum is m - B e^b + A e^{-b}, with m scores above b, A = sum e^{x_i} / 2 over those
below and B = sum e^{-x_i} / 2 over those above (x = s / tau). So b follows from sorted scores and one quadratic, in
O(n log n). k may be any real number between 0 and n. The Jacobian is diag(d) - d q^T, d_i = e^{-|x_i - b|} / (2 tau)
and q = d / sum d.
"""

import math
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from topk_registry import ClassificationLoss, LabelMixture
from topk_registry.rows import RowLoss, lapsum_rows


class LapSum(ClassificationLoss):
    r"""Negative log of the label's weight in LapSum's soft top-k.

    .. math:: L(s, y) = -\log p_y, \qquad p_i = F\Bigl(\frac{s_i - b}{\tau}\Bigr), \qquad \sum_i p_i = k

    F is the distribution function of the Laplace law.

    Use when:
        K is no whole number, or you compare soft top-k operators.

    Avoid when:
        Speed counts: it sorts every row in double precision. ``topk_nll`` asks nearly the same, with compiled kernels.

    Args:
        k: how many classes are chosen, 0 < k < n; it may be any real number.
        tau: temperature, positive; towards 0 the weights become the hard top-k.
        weight, reduction, label_smoothing, ignore_index: as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> LapSum(k=2)(torch.zeros(1, 4), torch.tensor([0]))
        tensor(0.6931)

    Reference: Struski, Bednarczyk, Podolak, Tabor. LapSum: One Method to Differentiate Them All: Ranking, Sorting and
    Top-k Selection. ICML 2025.
    """

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
        if not 0.0 < k < math.inf:
            raise ValueError(f"k must be a number above 0 and below the number of classes, got {k!r}")
        if not 0.0 < tau < math.inf:
            raise ValueError(f"tau must be positive and finite, got {tau!r}")
        self.k, self.tau = k, float(tau)

    def forward(self, logits: Tensor, target: Tensor | LabelMixture) -> Tensor:
        n = logits.shape[min(1, logits.ndim - 1)] if logits.ndim else 0
        if n > 1 and self.k >= n:
            raise ValueError(f"k must be below the number of classes: k = {self.k}, logits have {n}")
        return super().forward(logits, target)

    def row_loss(self, logits: Tensor) -> RowLoss:
        return lapsum_rows(self.k, tau=self.tau)

    def extra_repr(self) -> str:
        return f"k={self.k:g}, tau={self.tau:g}, {super().extra_repr()}"
