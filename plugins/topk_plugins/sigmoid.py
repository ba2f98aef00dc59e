"""Squared and absolute error of sigmoid outputs: the baselines that keep a gradient to well-classified examples."""

from torch import Tensor

from topk_registry import ClassificationLoss


class _SigmoidLoss(ClassificationLoss):
    """mean_j |p_j - [j = c]|^a with p = sigmoid(s); 1 - p is taken as sigmoid(-s), exact where p rounds to 1."""

    def power(self, error: Tensor) -> Tensor:
        raise TypeError(f"{type(self).__name__} must define power(error) -> error^a")

    def per_class(self, logits: Tensor) -> Tensor:
        off, on = self.power(logits.sigmoid()), self.power((-logits).sigmoid())
        return (off.sum(1, keepdim=True) - off + on) / logits.shape[1]

    def per_label(self, logits: Tensor, label: Tensor) -> Tensor:
        return self.power(wrong(logits, label).sigmoid()).mean(1)

    def per_target(self, logits: Tensor, target: Tensor) -> Tensor:
        """mean_j (M - m_j) p_j^a + m_j (1 - p_j)^a with masses m = w q and M their sum."""
        mass = target if self.weight is None else target * self.weight.to(target)
        off, on = self.power(logits.sigmoid()), self.power((-logits).sigmoid())
        return ((mass.sum(1, keepdim=True) - mass) * off + mass * on).mean(1)


def wrong(logits: Tensor, label: Tensor) -> Tensor:
    """The scores, but the label's negated [B, n]: their sigmoids are |p_j - [j = y]|."""
    label = label[:, None]
    return logits.scatter(1, label, -logits.gather(1, label))


class SigmoidMSE(_SigmoidLoss):
    r"""Mean squared error of independent sigmoid outputs.

    .. math:: L(s, y) = \frac1n \sum_j (p_j - [j = y])^2, \qquad p = \sigma(s)

    Args:
        weight, reduction, label_smoothing, ignore_index: as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> SigmoidMSE()(torch.zeros(1, 4), torch.tensor([0]))
        tensor(0.2500)

    Reference: Zhao, Yang, Sun et al. 2022, "Well-classified Examples are Underestimated in Classification with Deep
    Neural Networks", where it is a baseline.
    """

    def power(self, error: Tensor) -> Tensor:
        return error.square()


class SigmoidMAE(_SigmoidLoss):
    r"""Mean absolute error of independent sigmoid outputs.

    .. math:: L(s, y) = \frac1n \sum_j |p_j - [j = y]|, \qquad p = \sigma(s)

    Args:
        weight, reduction, label_smoothing, ignore_index: as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> SigmoidMAE()(torch.zeros(1, 4), torch.tensor([0]))
        tensor(0.5000)

    Reference: Zhao, Yang, Sun et al. 2022, "Well-classified Examples are Underestimated in Classification with Deep
    Neural Networks", where it is a baseline.
    """

    def power(self, error: Tensor) -> Tensor:
        return error
