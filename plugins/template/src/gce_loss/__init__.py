"""Generalized cross-entropy: between cross-entropy, which trains fast, and the mean absolute error, which is robust."""

from typing import Any

from torch import Tensor

from topk_registry import SoftmaxLoss
from topk_registry.options import number


class GeneralisedCrossEntropy(SoftmaxLoss):
    """Box-Cox transform of the likelihood, robust to wrong labels.

        L(s, y) = (1 - p_y^q) / q,    p = softmax(s)

    As q goes to 0, the loss becomes cross-entropy. At q = 1, the loss is half the mean absolute error of the
    probabilities. The gradient of a sample is weighted by p_y^q, so unlikely labels get less weight.

    Args:
        q: exponent in (0, 1].
        common: weight, reduction, label_smoothing, ignore_index, as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> loss = topk_registry.create_loss("gce", q=0.5)
        >>> loss(logits, target)

    Reference:
        Zhang, Sabuncu 2018, Generalized Cross Entropy Loss for Training Deep Neural Networks with Noisy Labels, eq. 6.
    """

    option_ranges = {"q": "(0, 1]"}  # noqa: RUF012
    tuning_grid = {"q": (0.3, 0.5, 0.7)}  # noqa: RUF012

    def __init__(self, *, q: float = 0.7, **common: Any) -> None:
        super().__init__(**common)
        self.q = number(q, "q", above=0, at_most=1)

    def curve(self, nll: Tensor) -> Tensor:  # -log p: [B] at labels, or [B, n] for each possible label
        return -(-self.q * nll).expm1() / self.q
