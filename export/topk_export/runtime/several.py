"""From the outputs of a run to several labels an image: the best classes, the chosen ones, and the set."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from topk_export.runtime.metadata import Metadata


@dataclass(frozen=True)
class ProbableClass:
    """One class of a prediction, and the chance that it is among the labels of the image."""

    index: int
    name: str
    probability: float


@dataclass(frozen=True)
class LabelPrediction:
    """The labels of one image, by a file of several labels.

    Args:
        top: the k most probable classes, best first, whether chosen or not.
        labels: the chosen classes, best first: those whose probability reaches the threshold of the class. None where
            the file is not calibrated.
        set: the set of labels, best first: the classes whose probability reaches one threshold, which misses as few
            labels as the file's metadata says. None where the file is not calibrated.
        set_size: the number of classes in the whole set.

    At most ``max_set`` classes of the set are given, where that was asked for.
    """

    top: tuple[ProbableClass, ...]
    labels: tuple[ProbableClass, ...] | None = None
    set: tuple[ProbableClass, ...] | None = None
    set_size: int | None = None


def rank_labels(
    outputs: Mapping[str, np.ndarray], row: int, metadata: Metadata, max_set: int | None
) -> LabelPrediction:
    """Return the prediction of one row of the outputs."""
    probabilities = outputs["probabilities"][row]
    order = np.argsort(-outputs["logits"][row], kind="stable")

    def ranked(chosen: np.ndarray) -> tuple[ProbableClass, ...]:
        return tuple(ProbableClass(int(i), metadata.class_names[i], float(probabilities[i])) for i in chosen)

    def inside(name: str) -> np.ndarray | None:
        return order[outputs[name][row][order]] if name in outputs else None

    chosen, members = inside("labels"), inside("set")
    return LabelPrediction(
        ranked(order[: metadata.k]),
        None if chosen is None else ranked(chosen),
        None if members is None else ranked(members[:max_set]),
        None if members is None else len(members),
    )
