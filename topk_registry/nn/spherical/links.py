"""Losses as functions of the sums (s, q) and of the label's score, and how each one ranks classes."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from topk_registry.registry import create_loss

SQUARED_ERROR = "mse"


class SumsLoss(Protocol):
    """A loss of the spherical family, as :class:`SphericalLinear` needs it."""

    def from_sums(self, s: Tensor, q: Tensor, score: Tensor, n: int) -> Tensor:
        """Loss of each label [m, K] from its score [m, K] and the sum s and sum of squares q of all n scores [m, 1]."""
        ...

    def log_weights(self, scores: Tensor) -> Tensor:
        """Logarithms of unnormalized probabilities, elementwise; classes are ranked by them."""
        ...


class LogWeights(nn.Module):
    """Turn the scores of a spherical layer into logits: their softmax is the probability that the loss predicts."""

    def __init__(self, loss: SumsLoss) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, scores: Tensor) -> Tensor:
        return self.loss.log_weights(scores)


def resolve(loss: str | nn.Module, options: Mapping[str, Any]) -> SumsLoss | None:
    """The loss by its registered name, or the given one; None for the squared error.

    Raises:
        ValueError: for a loss that needs more than the sums, or options that have no meaning here.
    """
    if loss == SQUARED_ERROR:
        if options:
            raise ValueError(f"loss {SQUARED_ERROR!r} takes no options, got {', '.join(options)}")
        return None
    criterion: Any = create_loss(loss, **options) if isinstance(loss, str) else loss
    if not (hasattr(criterion, "from_sums") and hasattr(criterion, "log_weights")):
        raise ValueError(
            f"loss {loss!r} cannot be computed from the sum and the sum of squares of the scores: it must define "
            f"from_sums(s, q, score, n) and log_weights(scores), as the losses of the spherical family do, or be "
            f"{SQUARED_ERROR!r}"
        )
    for option, usual in (("reduction", "mean"), ("ignore_index", -100)):
        if (given := getattr(criterion, option, usual)) != usual:
            raise ValueError(f"{option} of the loss has no effect here: give {option}={given!r} to the layer")
    if getattr(criterion, "label_smoothing", 0):
        raise ValueError("label_smoothing needs the score of every class: give 0, or targets of K labels with weights")
    return criterion


def loss_per_sample(
    loss: SumsLoss | None, s: Tensor, q: Tensor, a: Tensor, labels: Tensor, weight: Tensor, n: int
) -> Tensor:
    """Return the loss [m] of rows with K labels of the given weights [m, K].

    A loss of one label becomes its weighted mean over labels. The squared error is that to the target with these
    weights at the labels and 0 elsewhere, summed over classes.
    """
    if loss is None:
        squares = (weight[:, :, None] * weight[:, None]).masked_fill(~same_label(labels), 0).sum((1, 2))
        return q + squares - 2 * (weight * a).sum(1)
    return (weight * loss.from_sums(s[:, None], q[:, None], a, n)).sum(1)


def same_label(labels: Tensor) -> Tensor:
    """Return whether two labels of a row are equal: [m, K] -> [m, K, K]."""
    return labels[:, :, None] == labels[:, None]
