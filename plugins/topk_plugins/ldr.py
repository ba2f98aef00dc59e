r"""Label-distributionally robust losses: the worst case over which class to set against the label.

With z_l = s_l - s_y + gap [l != y] and distributions p over the n classes,

    L = max_p  sum_l p_l z_l - lambda KL(p || uniform)  =  lambda log mean_l exp(z_l / lambda).

Towards lambda = 0 it is the largest z, a hinge; at lambda = 1 without a gap it is cross-entropy less log n. ALDR-KL
chooses lambda for each sample: it takes away from lambda_0 where one class stands out.
"""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from topk_registry import ClassificationLoss
from topk_registry.options import number
from topk_registry.rows import RowLoss, aldr_rows, ldr_rows


class LDRKL(ClassificationLoss):
    r"""LDR-KL: a log-mean-exp of how far each class is ahead of the label, gap included.

    .. math:: L(s, y) = \lambda \log \frac1n \sum_l \exp\frac{s_l - s_y + c\,[l \ne y]}{\lambda}

    It may be negative: with all scores alike and no gap it is 0.

    Use when:
        Scores should keep a gap and cross-entropy's fixed temperature does not suit them; it is the plain member of
        the family of ``aldr_kl``, to compare with.

    Avoid when:
        You would not tune ``temperature`` and ``gap``: at temperature 1 and gap 0 it is cross-entropy less a constant.

    Args:
        temperature: lambda, positive.
        gap: c, at least 0: how far the label must be ahead.
        weight, reduction, label_smoothing, ignore_index: as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> LDRKL(gap=0.0)(torch.zeros(1, 4), torch.tensor([0]))
        tensor(0.)

    Reference: Zhu, Ying, Yang. Label Distributionally Robust Losses for Multi-class Classification: Consistency,
    Robustness and Adaptivity. ICML 2023.
    """

    option_ranges: ClassVar = {"temperature": "(0, inf)", "gap": "[0, inf)"}
    tuning_grid: ClassVar = {"temperature": (0.3, 1.0, 3.0), "gap": (0.0, 1.0)}
    takes_half = True

    def __init__(
        self,
        *,
        temperature: float = 1.0,
        gap: float = 1.0,
        weight: Tensor | Sequence[float] | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
    ) -> None:
        super().__init__(weight=weight, reduction=reduction, label_smoothing=label_smoothing, ignore_index=ignore_index)
        self.temperature, self.gap = number(temperature, "temperature", above=0), number(gap, "gap", at_least=0)

    def row_loss(self, logits: Tensor) -> RowLoss:
        return ldr_rows(logits.shape[1], temperature=self.temperature, gap=self.gap)

    def extra_repr(self) -> str:
        return f"temperature={self.temperature:g}, gap={self.gap:g}, {super().extra_repr()}"


class ALDRKL(ClassificationLoss):
    r"""ALDR-KL: LDR-KL with a temperature that adapts to each sample.

    .. math:: L = \lambda \log \frac1n \sum_l e^{z_l / \lambda}
        - \frac{\alpha \log n}{2 \lambda_0} (\lambda - \lambda_0)^2, \qquad
        \lambda = \lambda_0 \Bigl(1 - \frac{\mathrm{KL}(p \,\|\, \text{uniform})}{\alpha \log n}\Bigr)

    with p = softmax(z / lambda). The second equation says that lambda maximises the first; the largest solution is
    taken. The authors spread the fixed-point iteration from lambda_0 over the epochs, one step each, in a table of all
    samples; here it is carried through at once, by steps of Newton's, and needs no table. A clear sample gets a small
    lambda, down to lambda_0 (1 - 1 / alpha).

    The smaller alpha, the more often two solutions meet and vanish as the scores change. Lambda then jumps, and the
    loss with it: at such scores it is not continuous, and single and double precision may take different solutions.
    Below alpha = 1.2 it is not always the largest that is found: the compiled and the plain form differed in 21 of
    20000 random rows at 1.05, in none from 1.2 on.

    Of a distribution q over labels it is the loss with z = s - q s + gap (1 - q), as in the authors' code: one lambda
    for the row, not the expectation of the losses of its classes. With class weights w the row costs sum_c w_c q_c
    times the loss of the distribution that is proportional to w q.

    Use when:
        Labels are wrong anywhere, not only among similar classes, and you cannot clean them: clear samples get a small
        temperature, doubtful ones a large one.

    Avoid when:
        Labels are clean, or a step must cost no more than cross-entropy's. Its temperature is solved for in every row.

    Args:
        temperature: lambda_0, the largest lambda, positive.
        alpha: above 1; the larger, the less lambda adapts.
        gap: c, at least 0: how far the label must be ahead.
        weight, reduction, label_smoothing, ignore_index: as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> ALDRKL(gap=0.0)(torch.zeros(1, 4), torch.tensor([0]))
        tensor(0.)

    Reference: Zhu, Ying, Yang. Label Distributionally Robust Losses for Multi-class Classification: Consistency,
    Robustness and Adaptivity. ICML 2023.
    """

    option_ranges: ClassVar = {"temperature": "(0, inf)", "alpha": "(1, inf)", "gap": "[0, inf)"}
    tuning_grid: ClassVar = {"temperature": (0.3, 1.0, 3.0), "alpha": (1.5, 3.0)}
    takes_half = True

    def __init__(
        self,
        *,
        temperature: float = 1.0,
        alpha: float = 2.0,
        gap: float = 1.0,
        weight: Tensor | Sequence[float] | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
    ) -> None:
        super().__init__(weight=weight, reduction=reduction, label_smoothing=label_smoothing, ignore_index=ignore_index)
        self.temperature, self.gap = number(temperature, "temperature", above=0), number(gap, "gap", at_least=0)
        self.alpha = number(alpha, "alpha", above=1)

    def row_loss(self, logits: Tensor) -> RowLoss:
        return aldr_rows(temperature=self.temperature, alpha=self.alpha, gap=self.gap)

    def extra_repr(self) -> str:
        return f"temperature={self.temperature:g}, alpha={self.alpha:g}, gap={self.gap:g}, {super().extra_repr()}"
