"""Measures of each image from its scores: right or wrong among the k best, and the log-likelihood of its label."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from topk_registry.oldsets.scores import as_numpy

ROWS = 4096  # of a block: 32 MB of doubles at 1000 classes
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def check_scores(logits: Any, labels: Any) -> tuple[NDArray[Any], Integers]:
    """Return scores [N, n] and labels [N] as arrays.

    Raises:
        ValueError: shapes do not fit, labels are no classes of the scores, or scores are not finite.
    """
    scores, given = as_numpy(logits), np.asarray(as_numpy(labels))
    if scores.ndim != 2 or given.shape != scores.shape[:1] or not len(given):
        raise ValueError(f"expected scores [N, n] and labels [N], N above 0, got {scores.shape} and {given.shape}")
    if given.dtype.kind not in "iu":
        raise ValueError(f"labels must be whole numbers, got {given.dtype}")
    if given.min() < 0 or given.max() >= scores.shape[1]:
        raise ValueError(f"labels must be from 0 to {scores.shape[1] - 1}, got {given.min()} to {given.max()}")
    if not all(np.isfinite(scores[rows]).all() for rows in blocks(len(scores))):
        raise ValueError("scores must be finite")
    return scores, given.astype(np.int64)


def blocks(count: int) -> Iterator[slice]:
    """Slices of at most :data:`ROWS` rows."""
    return (slice(start, start + ROWS) for start in range(0, count, ROWS))


def log_softmax(scores: NDArray[Any]) -> Floats:
    """Logarithms of the softmax of each row [N, n]."""
    shifted = scores.astype(np.float64) - scores.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def label_log_likelihoods(logits: Any, labels: Any) -> Floats:
    """Return the log-probability of each image's label under the softmax of its scores [N].

    Args:
        logits: scores [N, n].
        labels: of the images [N].
    """
    scores, given = check_scores(logits, labels)
    return np.concatenate([_of_labels(log_softmax(scores[rows]), given[rows]) for rows in blocks(len(given))])


def topk_credits(logits: Any, labels: Any, k: int) -> Floats:
    """Return 1 for each image whose label is among the k largest scores, else 0 [N].

    Equal scores share their places: the credit is the label's chance under random tie-breaking, as in
    :class:`topk_registry.metrics.TopKAccuracy`.

    Args:
        logits: scores [N, n].
        labels: of the images [N].
        k: how many classes are looked at; n or more is always right.

    Example:
        >>> topk_credits(np.array([[3.0, 1.0, 1.0], [0.0, 2.0, 1.0]]), np.array([1, 2]), k=2)
        array([0.5, 1. ])
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k!r}")
    scores, given = check_scores(logits, labels)
    credits_ = []
    for rows in blocks(len(given)):
        own = _of_labels(scores[rows], given[rows])[:, None]
        above, tied = (scores[rows] > own).sum(1), (scores[rows] == own).sum(1)
        credits_.append(np.clip((k - above) / tied, 0.0, 1.0))
    return np.concatenate(credits_)


def top_classes(logits: Any) -> Integers:
    """Return the class of the largest score of each image [N]; the lowest number among equal ones."""
    return as_numpy(logits).argmax(-1).astype(np.int64)


def _of_labels(values: NDArray[Any], labels: Integers) -> NDArray[Any]:
    return values[np.arange(len(labels)), labels]
