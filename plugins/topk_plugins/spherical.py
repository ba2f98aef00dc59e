"""Losses of the spherical family: functions of the label's logit, the sum and the sum of squares of all logits only.

So an output layer of D classes on d features is trained exactly in O(d^2), whatever D. Two of them are
log-likelihoods, of probabilities in proportion to a polynomial of the logit instead of its exponential,

    spherical softmax  w_i = o_i^2 + eps              Taylor softmax  w_i = 1 + o_i + o_i^2 / 2

and the third bounds cross-entropy from above. Neither of the first two predicts with the argmax of the logits, as
spherical softmax cannot tell o from -o, and Taylor softmax is least at o = -1: predict with ``probabilities(logits)``.

Reference:
    de Brebisson, Vincent. An Exploration of Softmax Alternatives Belonging to the Spherical Loss Family. ICLR 2016.
"""

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from topk_registry import ClassificationLoss
from topk_registry.options import number
from topk_registry.rows import RowLoss, quadratic_bound_of_sums, quadratic_bound_rows, squares_rows


class _LogLikelihood(ClassificationLoss):
    """L(o, c) = log sum_i w_i - log w_c with weights w_i = (o_i + shift)^2 + epsilon."""

    epsilon: float = 1.0
    shift: float = 0.0  # added to all logits
    takes_half = True

    def row_loss(self, logits: Tensor) -> RowLoss:
        return squares_rows(epsilon=self.epsilon, shift=self.shift)

    def probabilities(self, logits: Tensor) -> Tensor:
        """The predicted probability of each class [B, n], in fp32 or wider."""
        return self.log_weights(_wide(logits)).softmax(-1)

    def log_weights(self, scores: Tensor) -> Tensor:
        """log w_i, elementwise: the probabilities are their softmax."""
        # log(x^2 + y^2) by the larger and the smaller of the two: the square overflows in fp32 from 2e19 on, and
        # ONNX has no hypot
        x, y = (scores + self.shift).abs(), scores.new_full((), math.sqrt(self.epsilon))
        larger = torch.maximum(x, y)
        return 2 * larger.log() + (torch.minimum(x, y) / larger).square().log1p()

    def from_sums(self, s: Tensor, q: Tensor, score: Tensor, n: int) -> Tensor:
        """The loss from the label's score, the sum s and the sum of squares q of all n scores; see SphericalLinear."""
        total = q + 2 * self.shift * s + n * (self.shift**2 + self.epsilon)
        return total.log() - self.log_weights(score)


class LogSphericalSoftmax(_LogLikelihood):
    """Negative log-likelihood under the spherical softmax.

        L(o, c) = log(sum_i o_i^2 + n eps) - log(o_c^2 + eps)

    Use when:
        The output layer is so large that its cost must not depend on the number of classes (``SphericalLinear``).

    Avoid when:
        Probabilities must be sharp: the largest that all classes can have add up to at most d + 1 for d features. It is
        even in the logits, so a logit far below zero is as likely as one far above.

    Args:
        epsilon: keeps the loss finite where the label's logit is 0; above 0, and needs tuning.
        weight, reduction, label_smoothing, ignore_index: as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> LogSphericalSoftmax()(torch.tensor([[0.0, 2.0]]), torch.tensor([1])).exp()
        tensor(1.2000)
    """

    option_ranges: ClassVar = {"epsilon": "(0, inf)"}
    tuning_grid: ClassVar = {"epsilon": (0.1, 0.3, 1.0)}

    def __init__(
        self,
        *,
        epsilon: float = 1.0,
        weight: Tensor | Sequence[float] | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
    ) -> None:
        super().__init__(weight=weight, reduction=reduction, label_smoothing=label_smoothing, ignore_index=ignore_index)
        self.epsilon = number(epsilon, "epsilon", above=0)

    def extra_repr(self) -> str:
        return f"epsilon={self.epsilon:g}, {super().extra_repr()}"


class LogTaylorSoftmax(_LogLikelihood):
    """Negative log-likelihood under the Taylor softmax, the second-order expansion of exp at 0.

        L(o, c) = log(n + sum_i o_i + sum_i o_i^2 / 2) - log(1 + o_c + o_c^2 / 2)

    The logits' origin matters: adding a constant to all of them changes the loss.

    Use when:
        The output layer is so large that its cost must not depend on the number of classes (``SphericalLinear``); of
        the two losses for it the one without an option.

    Avoid when:
        The logits of all classes fit in memory: cross-entropy is the better start.

    Args:
        weight, reduction, label_smoothing, ignore_index: as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> LogTaylorSoftmax()(torch.tensor([[0.0, 2.0]]), torch.tensor([1])).exp()
        tensor(1.2000)
    """

    shift = 1.0  # 1 + o + o^2/2 = ((o + 1)^2 + 1) / 2: spherical softmax with eps = 1, of logits plus 1


class SphericalBound(ClassificationLoss):
    """Bouchard's upper bound on cross-entropy that is quadratic in the logits, the tightest for each row.

        L(o, c) = m - o_c + (xi/t) ((D-1)/D - D u^2/4) + D log(1 + e^-xi) + lambda(xi) sum_i (o_i - m)^2

    with m the mean of the D logits, t = tanh(xi/2), u = 1 - t and lambda(xi) = t / (4 xi). Every xi gives a bound; the
    tightest solves xi^2 (1 - (1 - 2/D)^2 / t^2) = mean_i (o_i - m)^2. Being a bound on cross-entropy, it predicts with
    softmax.

    Use when:
        A bound on cross-entropy is wanted that is quadratic in the logits, for updates in closed form.

    Avoid when:
        You look for accuracy: where scores are far apart the bound is loose, and cross-entropy itself is as cheap.

    Args:
        weight, reduction, label_smoothing, ignore_index: as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> bound, log_softmax = SphericalBound(), torch.nn.CrossEntropyLoss()
        >>> logits, target = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([2])
        >>> log_softmax(logits, target), bound(logits, target)
        (tensor(0.4076), tensor(1.1434))

    Reference:
        Bouchard. Efficient bounds for the softmax function. NIPS workshop 2007, and the paper above.
    """

    takes_half = True

    def row_loss(self, logits: Tensor) -> RowLoss:
        return quadratic_bound_rows()

    def probabilities(self, logits: Tensor) -> Tensor:
        """The predicted probability of each class, softmax [B, n], in fp32 or wider."""
        return _wide(logits).softmax(-1)

    def log_weights(self, scores: Tensor) -> Tensor:
        """Return the scores themselves, as a bound on cross-entropy predicts with softmax."""
        return scores

    def from_sums(self, s: Tensor, q: Tensor, score: Tensor, n: int) -> Tensor:
        """The loss from the label's score, the sum s and the sum of squares q of all n scores; see SphericalLinear."""
        return quadratic_bound_of_sums(s, q, score, n)


def _wide(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
