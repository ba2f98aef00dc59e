"""The methods that a loss must have for :class:`SphericalLinear`, and functions that call these methods."""

from typing import Any, Protocol

from torch import Tensor, nn

from topk_registry.registry import create_loss

SQUARED_ERROR = "mse"


class SumsLoss(Protocol):
    """The methods that a loss must have for :class:`SphericalLinear`."""

    def from_sums(self, s: Tensor, q: Tensor, score: Tensor, n: int) -> Tensor:
        """Return the loss [m, K] of m rows for each of K labels with the scores ``score`` [m, K].

        ``s`` is the sum of all n scores of each row, and ``q`` is the sum of their squares: [m, 1].
        """
        ...

    def predictive_logits(self, scores: Tensor) -> Tensor:
        """Convert each score into the logarithm of an unnormalized probability, as in ``ClassificationLoss``."""
        ...


def resolve(loss: str | nn.Module) -> SumsLoss | None:
    """Return a loss object for the argument ``loss`` of :class:`SphericalLinear`. For ``"mse"``, return None.

    Args:
        loss: name of a registered loss, or a loss object, or ``"mse"`` (squared error).

    Raises:
        ValueError: the loss lacks a method of :class:`SumsLoss`, or has an option that the layer would ignore.
    """
    if loss == SQUARED_ERROR:
        return None
    criterion: Any = create_loss(loss) if isinstance(loss, str) else loss
    if not (hasattr(criterion, "from_sums") and hasattr(criterion, "predictive_logits")):
        raise ValueError(
            f"loss {loss!r} cannot be computed from the sum and the sum of squares of the scores: it must define "
            f"from_sums(s, q, score, n) and predictive_logits(scores), as spherical losses do, or be {SQUARED_ERROR!r}"
        )
    for option, usual in (("reduction", "mean"), ("ignore_index", -100)):
        if (given := getattr(criterion, option, usual)) != usual:
            raise ValueError(f"{option} of the loss has no effect here: pass {option}={given!r} to the layer")
    if getattr(criterion, "label_smoothing", 0):
        raise ValueError("label_smoothing needs the score of every class: set it to 0, or pass K weighted labels")
    return criterion


def loss_per_sample(
    loss: SumsLoss | None, s: Tensor, q: Tensor, a: Tensor, labels: Tensor, weight: Tensor, n: int
) -> Tensor:
    """Return the loss of each row [m]: the sum over labels of weight * (loss for this label).

    For the squared error, the loss is instead the sum over all n classes of (score - target)^2. The target of a class
    is the sum of the weights of all labels equal to this class, or 0 without such labels.

    Args:
        loss: result of :func:`resolve`. None: squared error.
        s, q: sum of all scores, and sum of their squares: [m].
        a, labels, weight: score, class index and weight of each label: [m, K].
        n: number of classes.
    """
    if loss is None:
        squares = (weight[:, :, None] * weight[:, None]).masked_fill(~same_label(labels), 0).sum((1, 2))
        return q + squares - 2 * (weight * a).sum(1)
    return (weight * loss.from_sums(s[:, None], q[:, None], a, n)).sum(1)


def same_label(labels: Tensor) -> Tensor:
    """Return, for each pair (i, j) of labels in a row, whether label i equals label j: [m, K] -> bool [m, K, K]."""
    return labels[:, :, None] == labels[:, None]
