"""Generalised cross-entropy: between cross-entropy, which learns fast, and the mean absolute error, which forgives."""

from typing import Any

from torch import Tensor

from topk_registry import ClassificationLoss


class GeneralisedCrossEntropy(ClassificationLoss):
    """Box-Cox transform of the likelihood, robust to wrong labels.

        L(s, c) = (1 - p_c^q) / q,    p = softmax(s)

    q -> 0 is cross-entropy, q = 1 is half the mean absolute error of the probabilities. An example whose label the
    model finds improbable pulls with weight p_c^q, so wrong labels pull less the larger q is.

    Args:
        q: in (0, 1].
        options: ``weight``, ``reduction``, ``label_smoothing`` and ``ignore_index``, as in cross-entropy.

    Example:
        >>> loss = topk_registry.create_loss("gce", q=0.5)
        >>> loss(logits, target)

    Reference:
        Zhang, Sabuncu 2018, Generalized Cross Entropy Loss for Training Deep Neural Networks with Noisy Labels, eq. 6.
    """

    def __init__(self, *, q: float = 0.7, **options: Any) -> None:
        super().__init__(**options)
        if not 0 < q <= 1:
            raise ValueError(f"q must be in (0, 1], got {q!r}")
        self.q = q

    def per_class(self, logits: Tensor) -> Tensor:
        # expm1 keeps the digits that 1 - p^q loses where p is near 1
        return -(self.q * logits.log_softmax(-1)).expm1() / self.q
