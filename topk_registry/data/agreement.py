"""A comparison of labels with the predictions of a model. The comparison finds class folders with wrong names."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from topk_registry.data.folders import listed
from topk_registry.errors import WrongLabelsError

MIN_IMAGES = 3  # a folder with fewer images is not judged
CHANCE_ODDS = 1.5  # accuracy a is close to random guesses if a / (1 - a) is at most 1.5 / (n - 1) for n classes


@dataclass(frozen=True)
class Agreement:
    """The result of :func:`agreement`."""

    accuracy: float  # top-1 accuracy, from 0 to 1; NaN if there are no images
    confused: list[tuple[str, str]]  # (label, other class that is predicted for more than half of the label's images)
    note: str  # describes `confused`; empty if no class is confused
    problem: str  # reason why the labels look wrong; empty if the labels look right

    def check(self, *, force: bool = False) -> None:
        if self.problem and not force:
            raise WrongLabelsError(f"{self.problem}; check the class folders, or pass --force to continue")


def agreement(predicted: NDArray[np.integer], labels: NDArray[np.integer], classes: Sequence[str]) -> Agreement:
    """Compare the predicted class of each image with the label of the image.

    Class c is confused with class d if c has at least 3 images, and d is predicted for more than half of these images.
    The labels look wrong if the accuracy is close to the accuracy of random guesses. The labels also look wrong if at
    least two classes are each confused with a class that is itself confused. For example, cats are confused with dogs,
    and dogs with cats. Then the folders of cats and dogs probably have exchanged names.

    Args:
        predicted: class indices that a model predicts: [N].
        labels: class indices: [N].
        classes: class names in the order of the class indices.
    """
    n = len(classes)
    accuracy = float((predicted == labels).mean()) if len(labels) else float("nan")
    usual: dict[int, int] = {}  # label -> the wrong class that is predicted for most images with this label
    for label in np.unique(labels).tolist():
        counts = np.bincount(predicted[labels == label], minlength=n)
        other = int(counts.argmax())
        if other != label and counts.sum() >= MIN_IMAGES and 2 * counts[other] > counts.sum():
            usual[label] = other
    confused = [(classes[label], classes[other]) for label, other in usual.items()]
    pairs = listed([f"{label!r} as {other!r}" for label, other in confused], 5)
    note = f"images of these folders are mostly predicted as another class: {pairs}" if confused else ""
    problems: list[str] = []
    if not accuracy > CHANCE_ODDS / (n - 1 + CHANCE_ODDS):
        problems.append(f"top-1 accuracy is {accuracy:.1%} on {len(labels)} images; random guesses have {1 / n:.1%}")
    if sum(other in usual for other in usual.values()) >= 2:
        problems.append(note)
    return Agreement(accuracy, confused, note, "; ".join(problems))
