"""Generalized cross-entropy, a loss between cross-entropy and the mean absolute error, for noisy labels."""

from typing import Annotated

from torch import Tensor
from typing_extensions import Unpack

from topk_registry import CommonOptions, SoftmaxLoss


class GeneralisedCrossEntropy(SoftmaxLoss):
    """Generalized cross-entropy: cross-entropy with less weight on samples whose label has a low probability.

        L(s, y) = (1 - p_y^q) / q,    p = softmax(s)

    Here s are the n logits of one sample, y is the label, and p_y is the probability of the label. The gradient is
    p_y^q times the gradient of cross-entropy. Wrong labels tend to have a low probability, so wrong labels have less
    influence.

    Args:
        q: exponent, above 0 and at most 1. As q goes to 0, the loss becomes cross-entropy. For q = 1, the loss is 1 -
            p_y, which is half of the absolute error between p and the one-hot label.
        common: the options weight, reduction, label_smoothing and ignore_index of ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> loss = topk_registry.create_loss("gce", q=0.5)
        >>> loss(logits, target)

    Reference:
        Zhang, Sabuncu 2018, Generalized Cross Entropy Loss for Training Deep Neural Networks with Noisy Labels, eq. 6.
    """

    tuning_grid = {"q": (0.3, 0.5, 0.7)}  # noqa: RUF012

    def __init__(self, *, q: Annotated[float, "(0, 1]"] = 0.7, **common: Unpack[CommonOptions]) -> None:
        super().__init__(**common)
        self.q = q

    def curve(self, nll: Tensor) -> Tensor:  # -log p: [B] at labels, or [B, n] for each possible label
        return -(-self.q * nll).expm1() / self.q
