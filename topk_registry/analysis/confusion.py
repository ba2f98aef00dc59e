"""Which classes are taken for each other: pairs, and groups of look-alikes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from topk_registry.analysis.measures import Floats, Integers, blocks, check_scores, log_softmax, top_classes

LIFT = 2.0  # times chance: two groups of equal size that are never taken for each other have just above 2 within
DEVIATIONS = 2.0  # of a Poisson count: five images at least join two classes, however rare chance would have them
MOST = 2000  # classes that are grouped, those with the most confusion; time grows with their third power


@dataclass(frozen=True)
class Pair:
    """Two classes that are taken for each other.

    Args:
        a, b: the classes.
        a_as_b, b_as_a: how many images of the one have the other as their best class.
        share: of the images of both.
    """

    a: int
    b: int
    a_as_b: int
    b_as_a: int
    share: float


def confusion_matrix(predicted: Integers, labels: Integers, n: int) -> Integers:
    """Return how many images of each class (rows) have each best class (columns) [n, n]."""
    return np.bincount(labels * n + predicted, minlength=n * n).reshape(n, n)


def confused_pairs(logits: Any, labels: Any) -> list[Pair]:
    """Return the pairs of classes that are taken for each other, those with the most images first.

    Args:
        logits: scores [N, n].
        labels: of the images [N].
    """
    scores, given = check_scores(logits, labels)
    n = scores.shape[1]
    best = top_classes(scores)
    seen, wrong = np.bincount(given, minlength=n), best != given
    low, high = np.minimum(best, given)[wrong], np.maximum(best, given)[wrong]
    pairs, where = np.unique(low * n + high, return_inverse=True)
    from_low = np.bincount(where, given[wrong] == low, minlength=len(pairs)).astype(int)
    total = np.bincount(where, minlength=len(pairs))
    order = np.lexsort((pairs, -total / (seen[pairs // n] + seen[pairs % n]), -total))
    return [
        Pair(
            int(pairs[i] // n),
            int(pairs[i] % n),
            int(from_low[i]),
            int(total[i] - from_low[i]),
            float(total[i] / (seen[pairs[i] // n] + seen[pairs[i] % n])),
        )
        for i in order.tolist()
    ]


def look_alikes(logits: Any, labels: Any, *, lift: float = LIFT) -> list[list[int]]:
    """Return groups of two or more classes that are taken for each other, the largest first.

    The softmax of the images of a class says what they are taken for. Two groups become one as long as their classes
    are taken for each other, on average, at least ``lift`` times as often as by chance, which is in proportion to how
    much each class is taken for others, or others for it. Two standard deviations of a count of images are taken off
    first, so that a few images join nothing. The pair of groups that is above chance most is joined first.

    Args:
        logits: scores [N, n].
        labels: of the images [N].
        lift: times chance.

    Reference: chance is that of modularity, Newman and Girvan 2004.
    """
    scores, given = check_scores(logits, labels)
    weights = _taken_for(scores, given)
    np.fill_diagonal(weights, 0.0)
    weights += weights.T
    degrees = weights.sum(1)
    chosen = np.sort(np.argsort(-degrees, kind="stable")[:MOST])
    chosen = chosen[degrees[chosen] > 0]
    if len(chosen) < 2:
        return []
    joined = weights[np.ix_(chosen, chosen)]
    chance = np.outer(degrees[chosen], degrees[chosen]) / degrees.sum()
    groups = _merged(joined, chance, lift)
    alike = [chosen[group].tolist() for group in groups if len(group) > 1]
    return sorted(alike, key=lambda group: (-len(group), group))


def suggested_k(groups: Sequence[Sequence[int]], labels: Integers) -> int | None:
    """Return the set size that holds the group of half of the images in groups or more; None without groups."""
    sizes = np.repeat([len(group) for group in groups], [int(np.isin(labels, group).sum()) for group in groups])
    return int(np.sort(sizes)[len(sizes) // 2]) if len(sizes) else None


def _taken_for(scores: np.ndarray, labels: Integers) -> Floats:
    """The sum of the softmax of each class's images [n, n]."""
    n = scores.shape[1]
    sums = np.zeros((n, n))
    for rows in blocks(len(labels)):
        order = np.argsort(labels[rows], kind="stable")
        present, starts = np.unique(labels[rows][order], return_index=True)
        sums[present] += np.add.reduceat(np.exp(log_softmax(scores[rows][order])), starts, axis=0)
    return sums


def _merged(joined: Floats, chance: Floats, lift: float) -> list[list[int]]:
    """Join the two groups of the highest ratio as long as it is at least the lift."""
    members: list[list[int]] = [[i] for i in range(len(joined))]
    ratio = _surely(joined) / chance
    np.fill_diagonal(ratio, 0.0)
    best = ratio.max(1)
    while (best_ratio := best.max()) >= lift:
        i = int(best.argmax())
        j = int(ratio[i].argmax())
        assert ratio[i, j] == best_ratio
        members[i] += members[j]
        members[j] = []
        for matrix in (joined, chance):
            matrix[i] += matrix[j]
            matrix[:, i] = matrix[i]
            matrix[j] = matrix[:, j] = 0.0
        ratio[i] = np.divide(_surely(joined[i]), chance[i], out=np.zeros(len(joined)), where=chance[i] > 0)
        ratio[i, i] = 0.0
        ratio[:, i] = ratio[i]
        ratio[j] = ratio[:, j] = 0.0
        best = ratio.max(1)
    return [sorted(group) for group in members if group]


def _surely(counts: Floats) -> Floats:
    """Counts less the deviations of chance, at least 0."""
    return np.maximum(counts - DEVIATIONS * np.sqrt(counts), 0.0)
