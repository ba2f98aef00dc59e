r"""Epsilon-softmax: softmax pushed towards a one-hot vector, so that a label is left alone once it is the best class.

Let p = softmax(s), T the k best classes, and add m to the probability of each of them:

    p'_i = (p_i + m [i in T]) / (1 + k m).

The paper has k = 1. There p' is near the one-hot vector e_t of the best class t: p' - e_t = (p - e_t) / (1 + m), so
|p' - e_t| is at most epsilon = sqrt(1 - 1/n) / (1 + m), reached where p is uniform. For any k the same holds of the
uniform distribution on the set, u_T = 1_T / k, as (1 + k m) p' = p + k m u_T:

    |p' - u_T| = |p - u_T| / (1 + k m) <= sqrt(max(1 - 1/k, 1/k - 1/n)) / (1 + k m).

|p - u_T|^2 is convex in p, so it is largest at an extreme point of the distributions whose k best classes are T. These
are uniform on j <= k classes of T, at a distance of 1/j - 1/k, or on T and r others, of 1/k - 1/(k + r).

Cross-entropy of p' has the gradient of that of p where the label is outside of T, and next to none inside. A top-k loss
does that too: it leaves a label alone once it is among the k best. What is lost in fitting, a symmetric loss of p gives
back, the absolute error |p - e_y| = 2 (1 - p_y), whose sum over all labels is 2 (n - 1) whatever p is. It pulls a label
of T on to the top, for any k: where the set alone counts, beta is small or 0.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from topk_registry import TopKLoss
from topk_registry.options import number
from topk_registry.rows import Curve, RowLoss, softmax_rows

LEAST = 0.1  # from this m on 1 - (1 - p) / (1 + m) keeps the digits of p + m


def _pushed(log_p, log_not, p, not_p, own, numbers):
    # equations 9 and 10 of topk_registry/ops/softmax/README.md; own: 1 in T, else 0
    # numbers: 1 / (1 + m), log((1 + k m) / (1 + m)), log(1 + k m), alpha, 2 beta, log floor
    rest = numbers[0] * not_p
    log_pushed, pull = log_p - numbers[2], numbers[3]
    if own > 0.0:
        log_pushed = math.log1p(-rest) - numbers[1]
        pull = numbers[3] * numbers[0] * p / (1.0 - rest)
    if log_pushed < numbers[5]:
        log_pushed = numbers[5]
        pull = 0.0
    return numbers[4] * not_p - numbers[3] * log_pushed, -(pull + numbers[4] * p) * not_p


class EpsilonSoftmax(TopKLoss):
    r"""Cross-entropy of epsilon-softmax, with the absolute error beside it, for noisy labels.

    .. math:: L(s, y) = -\alpha \log \frac{p_y + m\,[y \in T]}{1 + k m} + 2 \beta (1 - p_y),
        \qquad p = \mathrm{softmax}(s)

    T holds the k classes of largest score; with ties, those above the (k + 1)-th largest. At k = 1 it is the paper's
    loss. At other k it is a form of ours, derived in the module's text. Its first term leaves a label alone once it is
    among the k best. The second pulls it on to the top, so take a small ``beta`` there. At m = 0 and beta = 0 the loss
    is alpha times cross-entropy. It jumps where the label enters T, and its least value is about alpha log k.

    Use when:
        Labels are wrong anywhere and top-1 accuracy counts; with a larger k and ``beta=0``, where several answers are
        shown.

    Avoid when:
        Labels are clean: a label that is in T hardly pulls. Or ``alpha`` and ``m`` cannot be tuned: the authors' differ
        from data set to data set by a factor of 80.

    Args:
        k: size of the set, 1 <= k < n.
        m: what is added to the probabilities of the set, at least 0. The authors take 100 to 100,000. Between 0 and 0.1
            torch operations serve.
        alpha: factor of the cross-entropy of epsilon-softmax, at least 0. The authors take 0.001 to 0.1.
        beta: factor of the absolute error, at least 0.
        floor: the cross-entropy grows no more where its probability is below, in [0, 1). The equations have none, the
            authors' code has 1e-8: with m = 10,000 a label of p below 0.0001 does not pull.
        weight, reduction, label_smoothing, ignore_index: as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> EpsilonSoftmax(m=1.0, alpha=1.0, beta=0.0)(torch.tensor([[1.0, 0.0]]), torch.tensor([1]))
        tensor(2.0064)

    Reference: Wang, Zhou, Zhai, Jiang, Ji, Liu. Epsilon-Softmax: Approximating One-Hot Vectors for Mitigating Label
    Noise. NeurIPS 2024.
    """

    option_ranges: ClassVar = {"m": "[0, inf)", "alpha": "[0, inf)", "beta": "[0, inf)", "floor": "[0, 1)"}
    tuning_grid: ClassVar = {"alpha": (0.01, 0.1, 1.0), "m": (1e2, 1e4)}

    def __init__(
        self,
        k: int = 1,
        *,
        m: float = 1e4,
        alpha: float = 0.1,
        beta: float = 1.0,
        floor: float = 0.0,
        weight: Tensor | Sequence[float] | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
    ) -> None:
        super().__init__(
            k, weight=weight, reduction=reduction, label_smoothing=label_smoothing, ignore_index=ignore_index
        )
        self.m, self.alpha = number(m, "m", at_least=0), number(alpha, "alpha", at_least=0)
        self.beta, self.floor = number(beta, "beta", at_least=0), number(floor, "floor", at_least=0, below=1)

    takes_half = True

    def row_loss(self, logits: Tensor) -> RowLoss:
        m, k = self.m, self.k
        apart = math.log1p((k - 1) * (m / (1 + m)))  # m may be as large as a float
        log_floor = math.log(self.floor) if self.floor > 0.0 else -math.inf
        numbers = (1 / (1 + m), apart, math.log1p(m) + apart, self.alpha, 2 * self.beta, log_floor)
        curve = Curve(partial(self._loss, numbers), _pushed if m == 0.0 or m >= LEAST else None, numbers)
        return softmax_rows(curve, best=k if m > 0.0 else 0)

    def _loss(self, numbers: tuple[float, ...], log_p: Tensor, log_not: Tensor, own: Tensor | None) -> Tensor:
        share, apart, log_sum, alpha, twice_beta, log_floor = numbers
        not_p = -log_p.expm1()
        log_pushed = log_p - log_sum
        if own is not None:
            if self.m >= LEAST:
                within = (-share * not_p).log1p() - apart
            else:
                within = torch.logaddexp(log_p, log_p.new_tensor(self.m).log()) - log_sum
            log_pushed = torch.where(own > 0, within, log_pushed)
        return twice_beta * not_p - alpha * log_pushed.clamp(min=log_floor)

    def extra_repr(self) -> str:
        own = f"m={self.m:g}, alpha={self.alpha:g}, beta={self.beta:g}, floor={self.floor:g}"
        return f"{own}, {super().extra_repr()}"
