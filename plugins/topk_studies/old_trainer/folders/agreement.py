"""Whether labels fit the predictions of a model, or look as if folders stood for other classes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from topk_studies.old_trainer.folders.errors import WrongLabelsError

CHANCE_ODDS = 1.5  # times the odds of chance: up to 12 % of 12 classes and 60 % of 2 are near chance


@dataclass(frozen=True)
class Agreement:
    """Top-1 accuracy of labelled images, and the reason why the labels look wrong; empty where they do not."""

    accuracy: float
    images: int
    suspicion: str

    def __str__(self) -> str:
        return f"{self.accuracy:.1%} of {self.images} images"

    def check(self, *, force: bool, hint: str = "--force goes on all the same") -> None:
        """Refuse labels that look wrong, unless forced.

        Raises:
            WrongLabelsError: says why.
        """
        if self.suspicion and not force:
            raise WrongLabelsError(f"{self.suspicion}. Are these the model's classes and its images? {hint}")


def agreement(best: NDArray[np.integer], labels: NDArray[np.integer], classes: Sequence[str]) -> Agreement:
    """Compare the best class of each image [N] with its label [N].

    Labels look wrong where accuracy is near that of chance, and where the images of a folder are mostly taken for one
    class that is not theirs: where the class that most *others* of its folder are taken for tells an image's
    prediction twice as often as its label does. Where part of the folders stand for other classes, accuracy may be far
    above chance.
    """
    n, images = len(classes), len(labels)
    accuracy = float((best == labels).mean()) if images else float("nan")
    told = f"top-1 accuracy is {accuracy:.1%} on {images} images, where chance has {1 / n:.1%}"
    others, worst = _by_others(best, labels)
    if not accuracy > CHANCE_ODDS / (n - 1 + CHANCE_ODDS):
        suspicion = told
    elif accuracy < others / 2:
        suspicion = f"{told}, while images of one folder agree on a class for {others:.1%} of them"
    else:
        return Agreement(accuracy, images, "")
    if worst is not None:
        label, mostly = (classes[i] for i in worst)
        suspicion += f"; images with the label {label!r} are mostly taken for {mostly!r}"
    return Agreement(accuracy, images, suspicion)


def _by_others(best: NDArray[np.integer], labels: NDArray[np.integer]) -> tuple[float, tuple[int, int] | None]:
    """The share of images that are taken for what most others of their label are, and the largest label that moved."""
    hits, moved, worst = 0, 0, None
    order = np.argsort(labels, kind="stable")
    present, starts = np.unique(labels[order], return_index=True)
    for label, taken in zip(present, np.split(best[order], starts[1:]), strict=True):
        classes, counts = np.unique(taken, return_counts=True)
        ranked = np.argsort(counts)
        first, second = counts[ranked[-1]], counts[ranked[-2]] if len(classes) > 1 else 0
        if first - 1 > second:  # without the image itself it is still the first
            hits += int(first)
            mostly = int(classes[ranked[-1]])
            if mostly != label and first > moved:
                moved, worst = int(first), (int(label), mostly)
    return hits / max(1, len(labels)), worst
