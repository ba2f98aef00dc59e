"""From the outputs of a run to ranked classes: the k best classes, and the prediction set of a calibrated file."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from topk_export.errors import ModelFileError, PredictionError
from topk_export.runtime.metadata import LOGITS, Metadata

NOT_FINITE = "the model's outputs for this image are not finite numbers"


@dataclass(frozen=True)
class ClassScore:
    """One class of a prediction.

    Args:
        index, name: index and name of the class.
        probability: softmax probability, or the sigmoid in multilabel files.
        marginal: probability that the class is in a random set of k classes. None in multilabel files.
    """

    index: int
    name: str
    probability: float
    marginal: float | None = None


@dataclass(frozen=True)
class Prediction:
    """The ranked classes of one image.

    Args:
        top: the k classes with the largest scores, in descending order. If the class list is shorter, there are fewer.
        set: up to ``max_set`` classes of the prediction set, in descending order. None if the file is not calibrated.
        set_size: number of classes in the whole prediction set.
    """

    top: tuple[ClassScore, ...]
    set: tuple[ClassScore, ...] | None = None
    set_size: int | None = None


def check_outputs(outputs: Iterable[str], metadata: Metadata) -> None:
    """Raise :class:`ModelFileError` if predictions cannot be ranked from these outputs."""
    needed = (LOGITS, "probabilities") if metadata.multilabel else (LOGITS, "marginals", "probabilities")
    present = set(outputs)
    if missing := [name for name in needed if name not in present]:
        raise ModelFileError(f"predictions need the outputs {', '.join(needed)}; the model has no {', '.join(missing)}")


def finite_rows(outputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return whether each row can be ranked, bool [batch]. Scores may be -inf, but neither inf nor NaN."""
    best = outputs[LOGITS].max(-1, initial=-np.inf)  # NaN if any score is NaN
    return ~np.isnan(outputs["probabilities"]).any(-1) & (best < np.inf)


def rank_rows(
    outputs: Mapping[str, np.ndarray],
    metadata: Metadata,
    *,
    allowed: np.ndarray | None = None,
    max_set: int | None = None,
) -> Iterator[Prediction | PredictionError]:
    """Yield a prediction per row, or the error of a row whose outputs are not finite.

    Args:
        outputs: outputs of a run by name.
        metadata: metadata of the file.
        allowed: class list of the run, bool [n] or [batch, n].
        max_set: maximum number of classes to list per prediction set. ``set_size`` counts all classes.
    """
    check_outputs(outputs, metadata)
    if max_set is not None and max_set < 1:
        raise ValueError(f"max_set must be at least 1, got {max_set!r}")
    logits = outputs[LOGITS]
    masks = np.ones_like(logits, bool) if allowed is None else np.broadcast_to(allowed, logits.shape)
    for row, finite in enumerate(finite_rows(outputs)):
        yield _rank(outputs, row, masks[row], metadata, max_set) if finite else PredictionError(NOT_FINITE)


def _rank(
    outputs: Mapping[str, np.ndarray], row: int, mask: np.ndarray, metadata: Metadata, max_set: int | None
) -> Prediction:
    order = np.argsort(-outputs[LOGITS][row], kind="stable")
    order = order[mask[order]]
    probabilities = outputs["probabilities"][row]
    marginals = None if metadata.multilabel else outputs["marginals"][row]

    def ranked(chosen: np.ndarray) -> tuple[ClassScore, ...]:
        return tuple(
            ClassScore(
                int(i),
                metadata.class_names[i],
                float(probabilities[i]),
                None if marginals is None else float(marginals[i]),
            )
            for i in chosen
        )

    top = ranked(order[: metadata.k])
    if "set" not in outputs:
        return Prediction(top)
    members = order[outputs["set"][row][order]]
    return Prediction(top, ranked(members[:max_set]), len(members))
