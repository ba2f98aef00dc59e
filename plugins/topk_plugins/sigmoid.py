"""Squared and absolute error of sigmoid outputs: baselines of the paper on well-classified examples."""

from torch import Tensor

from topk_registry import ClassificationLoss


class _SigmoidLoss(ClassificationLoss):
    """Mean over j of |p_j - [j = c]|^a, p = sigmoid(s). 1 - p is computed as sigmoid(-s), precise if p rounds to 1."""

    power: int

    def per_label(self, logits: Tensor, labels: Tensor) -> Tensor:
        labels = labels[:, None]
        errors = logits.sigmoid().scatter(1, labels, (-logits.gather(1, labels)).sigmoid())
        return self._power(errors).mean(1)

    def per_class(self, logits: Tensor) -> Tensor:
        p = self._power(logits.sigmoid())
        return (p.sum(1, keepdim=True) + (self._power((-logits).sigmoid()) - p)) / logits.shape[1]

    def _power(self, p: Tensor) -> Tensor:
        return p.square() if self.power == 2 else p


class SigmoidMSE(_SigmoidLoss):
    r"""Mean squared error of independent sigmoid outputs.

    .. math:: L(s, y) = \frac1n \sum_j (p_j - [j = y])^2, \qquad p = \sigma(s)

    Use when:
        You want the baseline of the paper below.

    Avoid when:
        There are many classes, because the gradient of an unlikely label vanishes. Use ``bce``.

    Args:
        common: weight, reduction, label_smoothing, ignore_index, as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> SigmoidMSE()(torch.zeros(1, 4), torch.tensor([0]))
        tensor(0.2500)

    Reference: Zhao, Yang, Sun et al. 2022, "Well-classified Examples are Underestimated in Classification with Deep
    Neural Networks", where this loss is a baseline.
    """

    power = 2


class SigmoidMAE(_SigmoidLoss):
    r"""Mean absolute error of independent sigmoid outputs.

    .. math:: L(s, y) = \frac1n \sum_j |p_j - [j = y]|, \qquad p = \sigma(s)

    Use when:
        You want the baseline of the paper below.

    Avoid when:
        Accuracy matters: the gradient of an unlikely label vanishes, and with many classes training does not start.

    Args:
        common: weight, reduction, label_smoothing, ignore_index, as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> SigmoidMAE()(torch.zeros(1, 4), torch.tensor([0]))
        tensor(0.5000)

    Reference: Zhao, Yang, Sun et al. 2022, "Well-classified Examples are Underestimated in Classification with Deep
    Neural Networks", where this loss is a baseline.
    """

    power = 1
