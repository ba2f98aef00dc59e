"""A threshold for each class of several labels, chosen on held-out samples: the one with the largest F1."""

from dataclasses import dataclass

import numpy as np
from array_api_compat import array_namespace, device

from topk_studies.old_trainer.oldsets.risk import check_labelled
from topk_studies.old_trainer.oldsets.scores import Array

FALLBACK = 0.5  # a sigmoid says more likely than not from here on


@dataclass(frozen=True)
class ClassThresholds:
    """The smallest probability with which each class is chosen.

    Args:
        values: a threshold for each class [n].
        f1: of each class on the samples that chose its threshold [n]; NaN for classes without a label there.
        positives: how many of these samples have each class [n].

    Example:
        >>> thresholds = best_f1(held_out_logits.sigmoid(), torch.rand(64, 10) < 0.2)
        >>> thresholds(logits.sigmoid())  # bool [B, n]
    """

    values: np.ndarray
    f1: np.ndarray
    positives: np.ndarray

    def __call__(self, probabilities: Array) -> Array:
        """Return the chosen classes of each row, bool [B, n], from probabilities [B, n]."""
        xp = array_namespace(probabilities)
        return probabilities >= xp.asarray(self.values, dtype=probabilities.dtype, device=device(probabilities))

    @property
    def fallen_back(self) -> np.ndarray:
        """The classes that no sample has, whose threshold nothing chose, as indices."""
        return np.flatnonzero(self.positives == 0)


def best_f1(probabilities: Array, targets: Array, *, fallback: float = FALLBACK) -> ClassThresholds:
    """The threshold of each class with the largest F1 over all cut points.

    A cut point is a probability that occurs: a class is chosen where its probability is at least that. Of cut points
    with the same F1 the largest is taken. Thresholds that are chosen so promise nothing for new samples.

    Args:
        probabilities: of each class, held out [N, n].
        targets: 1 for the labels of a row, 0 for its other classes [N, n].
        fallback: the threshold of a class that is the label of no sample, where every cut point has an F1 of 0.
    """
    values, labels = check_labelled(probabilities, targets)
    positives = labels.sum(0)
    limits, f1 = np.full(values.shape[1], fallback, np.float64), np.full(values.shape[1], np.nan)
    for c in np.flatnonzero(positives):
        limits[c], f1[c] = _best_cut(values[:, c], labels[:, c])
    return ClassThresholds(limits, f1, positives)


def _best_cut(values: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """The cut point of one class with the largest F1, and that F1 = 2 TP / (labels + chosen)."""
    order = np.argsort(-values, kind="stable")
    falling = values[order]
    last = np.append(falling[1:] < falling[:-1], True)  # equal probabilities are chosen together
    right, chosen = np.cumsum(labels[order])[last], 1 + np.flatnonzero(last)
    f1 = 2 * right / (labels.sum() + chosen)  # quotients of whole numbers: equal ones are equal floats
    best = int(f1.argmax())
    return float(falling[last][best]), float(f1[best])
