"""Whether labels fit the predictions of a model, or look as if folders stood for other classes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MIN_IMAGES = 3  # fewer images of a folder are no evidence
CHANCE_ODDS = 1.5  # labels fit no better than chance below 1.5 times its odds


class WrongLabelsError(ValueError):
    """Labels contradict the predictions of a model, as if folders stood for other classes."""


@dataclass(frozen=True)
class Agreement:
    """Top-1 accuracy on labelled images, and the folders whose images are mostly predicted as one other class.

    Args:
        accuracy: top-1, from 0 to 1.
        images: number of images.
        swapped: pairs (label, predicted class) of folders of which more than half is predicted as one other class.
        problem: why the labels look wrong; empty if they do not.
    """

    accuracy: float
    images: int
    swapped: list[tuple[str, str]]
    problem: str

    def check(self, *, force: bool = False) -> None:
        """Raise ``WrongLabelsError`` if the labels look wrong, unless ``force``."""
        if self.problem and not force:
            raise WrongLabelsError(f"{self.problem}; check the class folders, or pass --force to continue")


def agreement(predicted: NDArray[np.integer], labels: NDArray[np.integer], classes: Sequence[str]) -> Agreement:
    """Compare the predicted class of each image [N] with its label [N].

    Labels look wrong if accuracy is close to chance, or if more than half of the images of two or more folders, or of
    a tenth of all folders, are predicted as one other class.
    """
    n = len(classes)
    accuracy = float((predicted == labels).mean()) if len(labels) else float("nan")
    swapped, present = [], np.unique(labels)
    for label in present:
        counts = np.bincount(predicted[labels == label], minlength=n)
        other = int(counts.argmax())
        if other != label and counts.sum() >= MIN_IMAGES and 2 * counts[other] > counts.sum():
            swapped.append((classes[label], classes[other]))
    problem = ""
    if not accuracy > CHANCE_ODDS / (n - 1 + CHANCE_ODDS):
        problem = f"top-1 accuracy is {accuracy:.1%} on {len(labels)} images, and chance is {1 / n:.1%}"
    if len(swapped) >= max(1, min(2, len(present) / 10)):
        pairs = ", ".join(f"{label!r} as {other!r}" for label, other in swapped[:5])
        more = f" and {len(swapped) - 5} more" if len(swapped) > 5 else ""
        problem += f"{'; ' * bool(problem)}images of these folders are mostly predicted as another class: {pairs}{more}"
    return Agreement(accuracy, len(labels), swapped, problem)
