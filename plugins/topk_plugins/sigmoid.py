"""Squared and absolute error of sigmoid outputs: the baselines that keep a gradient to well-classified examples."""

from torch import Tensor

from topk_registry import ClassificationLoss
from topk_registry.rows import Curve, RowLoss, sigmoid_rows


def _squared(log_p, log_not, p, not_p, own, numbers):
    slope = 2.0 * numbers[0] * p * not_p
    return numbers[0] * not_p * not_p, -slope * not_p, numbers[0] * p * p, slope * p


def _absolute(log_p, log_not, p, not_p, own, numbers):
    slope = numbers[0] * p * not_p
    return numbers[0] * not_p, -slope, numbers[0] * p, slope


class _SigmoidLoss(ClassificationLoss):
    """mean_j |p_j - [j = c]|^a with p = sigmoid(s); 1 - p is taken as sigmoid(-s), exact where p rounds to 1."""

    power: int
    takes_half = True

    def row_loss(self, logits: Tensor) -> RowLoss:
        compiled = _squared if self.power == 2 else _absolute
        return sigmoid_rows(Curve(self._errors, compiled, (1 / logits.shape[1],), others=True, logarithms=False))

    def _errors(self, log_p: Tensor, log_not: Tensor, own: None) -> tuple[Tensor, Tensor]:
        n = log_p.shape[-1]
        return (self.power * log_not).exp() / n, (self.power * log_p).exp() / n


class SigmoidMSE(_SigmoidLoss):
    r"""Mean squared error of independent sigmoid outputs.

    .. math:: L(s, y) = \frac1n \sum_j (p_j - [j = y])^2, \qquad p = \sigma(s)

    Use when:
        You want the baseline of the paper below.

    Avoid when:
        You want to train a network on many classes: its slope fades where the label is unlikely. Take ``bce``.

    Args:
        weight, reduction, label_smoothing, ignore_index: as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> SigmoidMSE()(torch.zeros(1, 4), torch.tensor([0]))
        tensor(0.2500)

    Reference: Zhao, Yang, Sun et al. 2022, "Well-classified Examples are Underestimated in Classification with Deep
    Neural Networks", where it is a baseline.
    """

    power = 2


class SigmoidMAE(_SigmoidLoss):
    r"""Mean absolute error of independent sigmoid outputs.

    .. math:: L(s, y) = \frac1n \sum_j |p_j - [j = y]|, \qquad p = \sigma(s)

    Use when:
        You want the baseline of the paper below.

    Avoid when:
        You want to train a network: its slope fades where the label is unlikely, and with many classes it does not
        start.

    Args:
        weight, reduction, label_smoothing, ignore_index: as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> SigmoidMAE()(torch.zeros(1, 4), torch.tensor([0]))
        tensor(0.5000)

    Reference: Zhao, Yang, Sun et al. 2022, "Well-classified Examples are Underestimated in Classification with Deep
    Neural Networks", where it is a baseline.
    """

    power = 1
