"""From the outputs of a run to ranked classes: the k best, the prediction set, and a share of the softmax."""

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from topk_export.errors import ModelFileError, PredictionError
from topk_export.runtime.metadata import Metadata
from topk_export.runtime.several import LabelPrediction, rank_labels

NOT_FINITE = "the model's outputs for this image are not finite numbers"


@dataclass(frozen=True)
class Ranked:
    """One class of a prediction: its chance of being in the top-k set, and its softmax share."""

    index: int
    name: str
    marginal: float
    softmax: float

    @property
    def probability(self) -> float:
        """The softmax share by its name of version 0.1."""
        warnings.warn("Ranked.probability is now called softmax", DeprecationWarning, stacklevel=2)
        return self.softmax


@dataclass(frozen=True)
class Prediction:
    """The ranked classes of one image.

    Args:
        top: the k classes of the largest scores, best first.
        set: the prediction set of a calibrated file, best first, which holds the right class as often as the file's
            metadata says; None where the file has none.
        set_size: the number of classes in the whole prediction set.
        softmax_set: the fewest classes whose shares reach the wanted softmax mass, best first; None when none was.
        softmax_set_size: the number of classes in all of that set.
        set_nodes: the names of the tree's nodes that the prediction set is made of, in a file calibrated with a tree.

    Of each set at most ``max_set`` classes are given, where that was asked for.
    """

    top: tuple[Ranked, ...]
    set: tuple[Ranked, ...] | None = None
    set_size: int | None = None
    softmax_set: tuple[Ranked, ...] | None = None
    softmax_set_size: int | None = None
    set_nodes: tuple[str, ...] | None = None


def node_names(outputs: Mapping[str, np.ndarray], metadata: Metadata) -> list[tuple[str, ...]] | None:
    """The names of the nodes of each row's set; None where the file has no tree."""
    if "set_nodes" not in outputs or metadata.sets is None:
        return None
    names = metadata.sets["tree"]["names"]
    return [tuple(names[i] for i in row if i >= 0) for row in outputs["set_nodes"]]


def node_above(index: int, nodes: Collection[str], metadata: Metadata) -> str | None:
    """The one of these nodes of the tree that a class is, or lies below; None where it lies below none."""
    assert metadata.sets is not None
    names, parents = metadata.sets["tree"]["names"], metadata.sets["tree"]["parents"]
    while index >= 0 and names[index] not in nodes:
        index = parents[index]
    return names[index] if index >= 0 else None


AnyPrediction = Prediction | LabelPrediction  # by what the file gives


def check_outputs(outputs: Iterable[str], metadata: Metadata) -> None:
    """Raise :class:`ModelFileError` where predictions cannot be ranked from these outputs."""
    there = set(outputs)
    if missing := [name for name in metadata.needed if name not in there]:
        raise ModelFileError(
            f"predictions need the outputs {' and '.join(metadata.needed)}; this model was exported without "
            f"{' and '.join(missing)}: use Predictor.run, or export it again with them"
        )


def are_numbers(outputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return for each row whether its outputs can be ranked, as bool [batch]; a score may be minus infinity."""
    best = outputs["logits"].max(-1, initial=-np.inf)
    shares = outputs["probabilities" if "probabilities" in outputs else "marginals"]
    return ~np.isnan(shares).any(-1) & (best < np.inf)  # NaN compares as false


def check_wanted(softmax_mass: float | None, max_set: int | None, metadata: Metadata) -> None:
    if softmax_mass is not None and metadata.several:
        raise ValueError(
            f"a softmax mass is of files with one label an image, got {softmax_mass!r} for a file of several labels: "
            "its sets come from topk-registry calibrate"
        )
    if softmax_mass is not None and not 0 < softmax_mass <= 1:
        raise ValueError(f"softmax_mass must be above 0 and at most 1, got {softmax_mass!r}")
    if max_set is not None and max_set < 1:
        raise ValueError(f"max_set must be at least 1, got {max_set!r}")


def rank_rows(
    outputs: Mapping[str, np.ndarray],
    metadata: Metadata,
    *,
    softmax_mass: float | None = None,
    max_set: int | None = None,
) -> Iterator[Prediction | LabelPrediction | PredictionError]:
    """Yield a prediction for each row, or the error of a row whose outputs are not numbers."""
    check_outputs(outputs, metadata)
    check_wanted(softmax_mass, max_set, metadata)
    if metadata.several:
        for row, fine in enumerate(are_numbers(outputs)):
            yield rank_labels(outputs, row, metadata, max_set) if fine else PredictionError(NOT_FINITE)
        return
    sets = outputs.get("set", [None] * len(outputs["logits"]))
    nodes = node_names(outputs, metadata) or [None] * len(outputs["logits"])
    rows = zip(outputs["logits"], outputs["marginals"], sets, nodes, are_numbers(outputs), strict=True)
    for logits, marginals, inside, names, fine in rows:
        if not fine:
            yield PredictionError(NOT_FINITE)
        else:
            yield replace(_rank(logits, marginals, inside, metadata, softmax_mass, max_set), set_nodes=names)


def _rank(
    logits: np.ndarray,
    marginals: np.ndarray,
    inside: np.ndarray | None,
    metadata: Metadata,
    softmax_mass: float | None,
    max_set: int | None,
) -> Prediction:
    share = softmax(logits)
    order = np.argsort(-logits, kind="stable")

    def ranked(chosen: np.ndarray) -> tuple[Ranked, ...]:
        names = metadata.class_names
        return tuple(Ranked(int(i), names[i], float(marginals[i]), float(share[i])) for i in chosen)

    def cut(members: np.ndarray | None) -> tuple[tuple[Ranked, ...] | None, int | None]:
        return (None, None) if members is None else (ranked(members[:max_set]), len(members))

    mass = None
    if softmax_mass is not None:  # rounding may leave the sum of all shares below a mass of 1
        mass = order[: int(np.searchsorted(np.cumsum(share[order]), softmax_mass)) + 1]
    calibrated = None if inside is None else order[inside[order]]
    return Prediction(ranked(order[: metadata.k]), *cut(calibrated), *cut(mass))


def softmax(logits: np.ndarray) -> np.ndarray:
    """Softmax over the last axis, in float64."""
    e = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)
