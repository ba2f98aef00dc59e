"""Check whether labels fit the predictions of a model, or whether folders have wrong names.

If two folders are swapped, the images of each folder are predicted as the class of the other folder. If names are
shifted, the images of each folder are predicted as the next class. If the model does not know a class, the images of
this class are predicted as another class, but the images of the other class are predicted correctly.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from topk_registry.data.folders import listed

MIN_IMAGES = 3  # minimum number of images per folder for a conclusion
CHANCE_ODDS = 1.5  # accuracy is at chance level if its odds are below 1.5 times the odds of random guesses


class WrongLabelsError(ValueError):
    """The labels contradict the predictions of a model, as if folders had wrong names."""


@dataclass(frozen=True)
class Agreement:
    """Top-1 accuracy on labeled images, and the folders whose images are mostly predicted as one other class.

    Args:
        accuracy: top-1 accuracy, from 0 to 1.
        confused: pairs (label, predicted class) of folders with more than half of the images predicted as one other
            class.
        problem: why the labels look wrong. Empty if the labels look right.
    """

    accuracy: float
    confused: list[tuple[str, str]]
    problem: str

    def check(self, *, force: bool = False) -> None:
        """Raise ``WrongLabelsError`` if the labels look wrong. With ``force``, raise nothing."""
        if self.problem and not force:
            raise WrongLabelsError(f"{self.problem}; check the class folders, or pass --force to continue")


def agreement(predicted: NDArray[np.integer], labels: NDArray[np.integer], classes: Sequence[str]) -> Agreement:
    """Compare the predicted class of each image [N] with its label [N].

    Labels look wrong if the accuracy is close to the accuracy of random guesses, or if at least two folders look
    exchanged: most images of folder A are predicted as one class B, and most images of folder B as one other class.
    """
    n = len(classes)
    accuracy = float((predicted == labels).mean()) if len(labels) else float("nan")
    usual: dict[int, int] = {}  # per folder, the wrong class as which most images of the folder are predicted
    for label in np.unique(labels).tolist():
        counts = np.bincount(predicted[labels == label], minlength=n)
        other = int(counts.argmax())
        if other != label and counts.sum() >= MIN_IMAGES and 2 * counts[other] > counts.sum():
            usual[label] = other
    swapped = [label for label, other in usual.items() if other in usual]
    problem = ""
    if not accuracy > CHANCE_ODDS / (n - 1 + CHANCE_ODDS):
        problem = f"top-1 accuracy is {accuracy:.1%} on {len(labels)} images, and random guesses have {1 / n:.1%}"
    confused = [(classes[label], classes[other]) for label, other in usual.items()]
    if len(swapped) >= 2:
        problem += f"{'; ' * bool(problem)}images of these folders are mostly predicted as another class: "
        problem += pairs(confused)
    return Agreement(accuracy, confused, problem)


def pairs(confused: Sequence[tuple[str, str]]) -> str:
    """Return the first five pairs (label, predicted class) as text."""
    return listed([f"{label!r} as {other!r}" for label, other in confused], 5)
