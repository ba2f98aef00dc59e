"""Spherical losses as functions of the sums (s, q) and the label's score, and how each loss ranks the classes."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from topk_registry.registry import create_loss

SQUARED_ERROR = "mse"


class SumsLoss(Protocol):
    """Interface of a spherical loss for :class:`SphericalLinear`."""

    def from_sums(self, s: Tensor, q: Tensor, score: Tensor, n: int) -> Tensor:
        """Return the loss of each label [m, K] from its score [m, K] and the sums s and q over all n scores [m, 1]."""
        ...

    def log_weights(self, scores: Tensor) -> Tensor:
        """Return logarithms of unnormalized probabilities elementwise. Classes are ranked by these logarithms."""
        ...


class LogWeights(nn.Module):
    """Convert scores of a spherical layer into logits whose softmax gives the probabilities of the loss."""

    def __init__(self, loss: SumsLoss) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, scores: Tensor) -> Tensor:
        return self.loss.log_weights(scores)


def resolve(loss: str | nn.Module, options: Mapping[str, Any]) -> SumsLoss | None:
    """Return the loss: a registered loss by name, or the given loss. Return None for the squared error.

    Raises:
        ValueError: the loss cannot be computed from the sums, or an option has no effect here.
    """
    if loss == SQUARED_ERROR:
        if options:
            raise ValueError(f"loss {SQUARED_ERROR!r} takes no options, got {', '.join(options)}")
        return None
    criterion: Any = create_loss(loss, **options) if isinstance(loss, str) else loss
    if not (hasattr(criterion, "from_sums") and hasattr(criterion, "log_weights")):
        raise ValueError(
            f"loss {loss!r} cannot be computed from the sum and the sum of squares of the scores: it must define "
            f"from_sums(s, q, score, n) and log_weights(scores), as spherical losses do, or be "
            f"{SQUARED_ERROR!r}"
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
    """Return the loss [m] of rows with K labels of the given weights [m, K].

    The squared error is summed over classes. The target has these weights at the labels and 0 elsewhere. Any other loss
    is the weighted sum of the losses of the labels.
    """
    if loss is None:
        squares = (weight[:, :, None] * weight[:, None]).masked_fill(~same_label(labels), 0).sum((1, 2))
        return q + squares - 2 * (weight * a).sum(1)
    return (weight * loss.from_sums(s[:, None], q[:, None], a, n)).sum(1)


def same_label(labels: Tensor) -> Tensor:
    """Return which pairs of labels in a row [m, K] are equal: booleans [m, K, K]."""
    return labels[:, :, None] == labels[:, None]
