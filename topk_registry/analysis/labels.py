"""Labels that are probably wrong, from the scores of a model that did not learn them by heart.

A label is suspicious where two things come together. Its class is not among the k classes of the highest scores. And
another class is present with confidence: its probability is at least the mean probability that this class has over the
images that are labelled so (confident learning). Suspicious labels are ordered by the exact log-odds of the label being
among the k best: at k = 1 those of its softmax probability, at k = 5 those of five answers holding it.

Scores should come from a model that has not been trained on these labels, as training fits wrong labels, too.

Reference: Northcutt, Jiang, Chuang, *Confident Learning: Estimating Uncertainty in Dataset Labels*, JAIR 70, 2021.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from topk_registry.analysis.measures import blocks, check_scores, log_softmax
from topk_registry.ops.ksubset import topk_label_margins

NEAR = 1e-6  # probabilities this close are equal: they come from scores in single precision


@dataclass(frozen=True)
class LabelIssues:
    """What the scores say of each label.

    Args:
        k: the number of answers.
        log_odds: of the label being among the k best [N].
        rank: of the label by its score, 1 for the highest [N]; classes of equal score do not count.
        suggested: the class that the image is of, by the scores [N]: the confident one, or else the best other one.
        suspicious: whether the label is probably wrong [N].
        thresholds: the confident probability of each class [n]; infinite for a class that no label names.
    """

    k: int
    log_odds: NDArray[np.float64]
    rank: NDArray[np.int64]
    suggested: NDArray[np.int64]
    suspicious: NDArray[np.bool_]
    thresholds: NDArray[np.float64]

    @property
    def order(self) -> NDArray[np.int64]:
        """All images, the suspicious ones first, each part by rising log-odds [N]."""
        return np.lexsort((self.log_odds, ~self.suspicious))

    @property
    def found(self) -> NDArray[np.int64]:
        """The images with suspicious labels, by rising log-odds."""
        return self.order[: int(self.suspicious.sum())]


def label_issues(logits: Any, labels: Any, *, k: int = 1, temperature: float = 1.0) -> LabelIssues:
    """Find the labels that are probably wrong.

    Args:
        logits: scores [N, n], whose softmax is the model's probabilities.
        labels: class indices [N].
        k: the number of answers, 1 <= k <= n - 1: a label among the k best is not suspicious.
        temperature: divides the scores.

    Example:
        >>> import numpy as np
        >>> logits = np.log([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.1, 0.9], [0.95, 0.05]])
        >>> found = label_issues(logits, np.array([0, 0, 1, 1, 1]))
        >>> found.found, found.suggested[4]
        (array([4]), np.int64(0))
    """
    scores, given = check_scores(logits, labels)
    if not 0.0 < temperature < np.inf:
        raise ValueError(f"temperature must be positive and finite, got {temperature!r}")
    count = len(given)
    logs = ((rows, log_softmax(scores[rows] / temperature)) for rows in blocks(count))
    thresholds = _means(((rows, np.exp(log)) for rows, log in logs), given, scores.shape[1])
    log_odds, rank = np.empty(count), np.empty(count, np.int64)
    suggested, confident = np.empty(count, np.int64), np.empty(count, np.int64)
    for rows in blocks(count):
        mine, label = log_softmax(scores[rows] / temperature), given[rows]
        # plain torch: to compile the kernels would take longer than to look at a million labels
        log_odds[rows] = topk_label_margins(torch.from_numpy(mine), torch.from_numpy(label), k).numpy()
        rank[rows] = 1 + (mine > mine[np.arange(len(label)), label][:, None]).sum(axis=1)
        confident[rows] = _confident(np.exp(mine), thresholds)
        mine[np.arange(len(label)), label] = -np.inf
        suggested[rows] = mine.argmax(axis=1)
    other = (confident >= 0) & (confident != given)
    suggested = np.where(other, confident, suggested)
    return LabelIssues(k, log_odds, rank, suggested, other & (rank > k), thresholds)


def class_thresholds(probabilities: Any, labels: Any) -> NDArray[np.float64]:
    """The mean probability of each class over the images of its label [n]; infinite where there is none.

    Args:
        probabilities: of each class [N, n].
        labels: class indices [N].
    """
    values, given = check_scores(probabilities, labels)
    return _means([(slice(0, len(given)), values)], given, values.shape[1])


def confident_joint(probabilities: Any, labels: Any) -> NDArray[np.int64]:
    """Count images by their label and the class that is confidently present [n, n].

    An image counts for the class of highest probability among those that reach their threshold; where none does, the
    image counts nowhere. Counts beside the diagonal are labels that are probably wrong.

    Args:
        probabilities: of each class [N, n].
        labels: class indices [N].
    """
    values, given = check_scores(probabilities, labels)
    confident = _confident(values, class_thresholds(values, given))
    joint = np.zeros((values.shape[1],) * 2, np.int64)
    np.add.at(joint, (given[confident >= 0], confident[confident >= 0]), 1)
    return joint


def _confident(probabilities: NDArray[np.float64], thresholds: NDArray[np.float64]) -> NDArray[np.int64]:
    """The likeliest class of those that reach their threshold [N]; -1 where none does."""
    reached = np.where(probabilities >= thresholds - NEAR, probabilities, -1.0)
    best = reached.argmax(axis=1)
    return np.where(np.take_along_axis(reached, best[:, None], axis=1)[:, 0] < 0.0, -1, best)


def _means(parts: Iterable[tuple[slice, NDArray[np.float64]]], labels: Any, n: int) -> NDArray[np.float64]:
    sums, counts = np.zeros(n), np.bincount(labels, minlength=n)
    for at, probabilities in parts:
        own = np.take_along_axis(probabilities, labels[at][:, None], axis=1)[:, 0]
        sums += np.bincount(labels[at], own, minlength=n)
    with np.errstate(invalid="ignore"):
        return np.where(counts > 0, np.maximum(sums / counts, 2 * NEAR), np.inf)
