"""Predictions from the outputs of an exported model: the top-k classes, and the prediction set if there is one."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from topk_export.errors import ModelFileError, PredictionError
from topk_export.runtime.metadata import LOGITS, Metadata

NOT_FINITE = "the model's outputs for this image are not finite numbers"


@dataclass(frozen=True)
class ClassScore:
    """One class of a prediction, with its probabilities.

    Args:
        index, name: index and name of the class.
        probability: softmax probability of the class. In multilabel files, sigmoid(logit / temperature).
        marginal: probability that the class is in a random set of k classes (top-k marginal). None if the file
            computes no marginals.
    """

    index: int
    name: str
    probability: float
    marginal: float | None = None


@dataclass(frozen=True)
class Prediction:
    """The prediction for one image.

    Args:
        top: the k allowed classes with the largest logits, best class first. If fewer than k classes are allowed,
            ``top`` contains all allowed classes.
        set: the classes of the prediction set, best class first. ``max_set`` of :meth:`Predictor.stream` limits the
            number of classes. A prediction set contains the true class with a chosen probability. None if the file is
            not calibrated.
        set_size: number of classes in the whole prediction set. None if the file is not calibrated.
    """

    top: tuple[ClassScore, ...]
    set: tuple[ClassScore, ...] | None = None
    set_size: int | None = None


def check_outputs(outputs: Iterable[str], metadata: Metadata) -> None:
    """Raise :class:`ModelFileError` if predictions need a model output whose name is not in ``outputs``."""
    needed = [name for name in (LOGITS, "marginals", "probabilities") if name in metadata.outputs]
    present = set(outputs)
    if missing := [name for name in needed if name not in present]:
        raise ModelFileError(f"predictions need the outputs {', '.join(needed)}; the model has no {', '.join(missing)}")


def rank_rows(
    outputs: Mapping[str, np.ndarray],
    metadata: Metadata,
    *,
    allowed: np.ndarray | None = None,
    max_set: int | None = None,
) -> Iterator[Prediction | PredictionError]:
    """Yield one prediction per row. For a row with NaN or a logit of plus infinity, yield an exception instead.

    ``outputs`` are the outputs of one run of the model, by name. ``allowed`` is the mask of the allowed classes in this
    run, bool [n] or [batch, n]. A prediction lists at most ``max_set`` classes in ``set``, but ``set_size`` counts all
    classes of the prediction set.
    """
    if max_set is not None and max_set < 1:
        raise ValueError(f"max_set must be at least 1, got {max_set!r}")
    logits = outputs[LOGITS]
    masks = np.ones_like(logits, bool) if allowed is None else np.broadcast_to(allowed, logits.shape)
    best = logits.max(-1, initial=-np.inf)  # NaN if any logit is NaN; the logit -inf is allowed
    for row, finite in enumerate(~np.isnan(outputs["probabilities"]).any(-1) & (best < np.inf)):
        yield _rank(outputs, row, masks[row], metadata, max_set) if finite else PredictionError(NOT_FINITE)


def _rank(
    outputs: Mapping[str, np.ndarray], row: int, mask: np.ndarray, metadata: Metadata, max_set: int | None
) -> Prediction:
    order = np.argsort(-outputs[LOGITS][row], kind="stable")
    order = order[mask[order]]
    probabilities = outputs["probabilities"][row]
    marginals = outputs["marginals"][row] if "marginals" in outputs else None

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
