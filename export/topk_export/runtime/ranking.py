"""From the outputs of a run to ranked classes: the k best, and the fewest with a wanted share of the softmax."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from topk_export.errors import ModelFileError, PredictionError
from topk_export.runtime.metadata import Metadata

NEEDED = ("logits", "marginals")


@dataclass(frozen=True)
class Ranked:
    """One class of a prediction: its chance of being in the top-k set, and its softmax share."""

    index: int
    name: str
    marginal: float
    probability: float


@dataclass(frozen=True)
class Prediction:
    """The ranked classes of one image.

    Args:
        top: the k classes of the largest scores, best first.
        set: the fewest classes whose softmax shares reach the wanted coverage, best first; None when none was wanted.
            At most ``max_set`` of them, where that was given.
        set_size: the number of classes in the whole set; None when none was wanted.
    """

    top: tuple[Ranked, ...]
    set: tuple[Ranked, ...] | None = None
    set_size: int | None = None


def check_outputs(outputs: Mapping[str, object]) -> None:
    """Raise :class:`ModelFileError` where predictions cannot be ranked from these outputs."""
    if missing := [name for name in NEEDED if name not in outputs]:
        raise ModelFileError(
            f"predictions need the outputs logits and marginals; this model was exported without "
            f"{' and '.join(missing)}: use Predictor.run, or export it again with them"
        )


def check_wanted(coverage: float | None, max_set: int | None) -> None:
    if coverage is not None and not 0 < coverage <= 1:
        raise ValueError(f"coverage must be above 0 and at most 1, got {coverage!r}")
    if max_set is not None and max_set < 1:
        raise ValueError(f"max_set must be at least 1, got {max_set!r}")


def rank_rows(
    outputs: Mapping[str, np.ndarray], metadata: Metadata, *, coverage: float | None = None, max_set: int | None = None
) -> Iterator[Prediction | PredictionError]:
    """Yield a prediction for each row, or the error of a row whose outputs are not numbers."""
    check_outputs(outputs)
    check_wanted(coverage, max_set)
    for logits, marginals in zip(outputs["logits"], outputs["marginals"], strict=True):
        if np.isnan(marginals).any() or not logits.max() < np.inf:  # NaN compares as false
            yield PredictionError("the model's outputs for this image are not finite numbers")
        else:
            yield _rank(logits, marginals, metadata, coverage, max_set)


def _rank(
    logits: np.ndarray, marginals: np.ndarray, metadata: Metadata, coverage: float | None, max_set: int | None
) -> Prediction:
    share = softmax(logits)
    order = np.argsort(-logits, kind="stable")

    def ranked(chosen: np.ndarray) -> tuple[Ranked, ...]:
        names = metadata.class_names
        return tuple(Ranked(int(i), names[i], float(marginals[i]), float(share[i])) for i in chosen)

    top = ranked(order[: metadata.k])
    if coverage is None:
        return Prediction(top)
    # rounding may leave the sum of all shares below a coverage of 1
    size = min(int(np.searchsorted(np.cumsum(share[order]), coverage)) + 1, len(order))
    return Prediction(top, ranked(order[: size if max_set is None else min(size, max_set)]), size)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Softmax over the last axis, in float64."""
    e = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)
