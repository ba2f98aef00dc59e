"""Thresholds of scores: one for all classes, one a class, or something between the two.

With N calibration scores, the threshold is the ceil((N + 1)(1 - alpha))-th smallest of them, and infinite where that is
beyond N. A new score from the same distribution is at most the threshold with probability at least 1 - alpha, and less
than 1 - alpha + 1 / (N + 1) where scores are never equal.

Where sets may not be empty, the best class is in them at any threshold, so its score counts as minus infinity
(``counted``). A threshold of minus infinity then says that the best class alone covers
at least 1 - alpha. All functions here take scores of either kind.

Orders are computed with alpha as a fraction, as it is written in decimals: 0.07 of 100 samples are 7, where floating
point has 7.000000000000001.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from topk_studies.old_trainer.oldsets.kmeans import weighted_kmeans
from topk_studies.old_trainer.oldsets.scores import Array, as_numpy

# a class's scores as Ding et al. 2023 describe them to the clustering
QUANTILES = tuple(Fraction(i, 10) for i in range(5, 10))


@dataclass(frozen=True)
class Thresholds:
    """The largest score, and the largest rank, with which a class is in a set. Both hold.

    Args:
        scores: one number for all classes, or one a class [n]; infinite: any score.
        max_rank: the largest rank, one for all classes or one a class [n]; None: any.
        groups: the names of groups of samples, where ``scores`` has one threshold for each of them [G].
    """

    scores: float | np.ndarray
    max_rank: int | np.ndarray | None = None
    groups: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if np.isnan(np.asarray(self.scores)).any():
            raise ValueError(f"thresholds must be numbers, got NaN in {self.scores}")
        if self.max_rank is not None and np.min(self.max_rank) < 1:
            raise ValueError(f"the largest rank must be at least 1, got {np.min(self.max_rank)}")
        if self.groups and np.shape(self.scores) != (len(self.groups),):
            raise ValueError(f"expected a threshold for each of {len(self.groups)} groups, got {np.shape(self.scores)}")

    @property
    def of_groups(self) -> np.ndarray:
        """The threshold of each group, and last the one of samples whose group is not told: the largest [G + 1]."""
        own = np.asarray(self.scores, np.float64)
        return np.append(own, own.max())

    def number_of(self, group: str) -> int:
        """The number of a group; raise where calibration has not seen it."""
        if group not in self.groups:
            raise ValueError(f"no threshold is of group {group!r}; there are {', '.join(self.groups) or 'no groups'}")
        return self.groups.index(group)

    def unlimited(self, n: int) -> np.ndarray:
        """The classes that are in every set, bool [n]."""
        if self.groups:
            return np.full(n, bool(np.isposinf(self.scores).all()))
        ranks = n if self.max_rank is None else self.max_rank
        return np.broadcast_to(np.isposinf(self.scores) & (np.asarray(ranks) >= n), (n,))


def order_of(count: int, alpha: float | Fraction) -> int:
    """ceil((count + 1)(1 - alpha)), for alpha as it is written in decimals: 0.1 is a tenth."""
    return math.ceil((count + 1) * (1 - as_fraction(alpha)))


def as_fraction(alpha: float | Fraction) -> Fraction:
    """Alpha as it is written in decimals; raise unless it is between 0 and 1."""
    check_alpha(alpha)
    return alpha if isinstance(alpha, Fraction) else Fraction(repr(float(alpha)))


def check_alpha(alpha: float | Fraction) -> None:
    """Raise unless alpha, the share of labels that may be missed, is between 0 and 1."""
    if not 0 < alpha < 1:
        raise ValueError(
            f"alpha, the share of labels that may be missed, must be above 0 and below 1, got {alpha!r}; "
            "0.1 asks for 90 % coverage"
        )


def fewest(alpha: float) -> int:
    """The fewest calibration scores with a finite threshold: ceil(1 / alpha) - 1."""
    return math.ceil(1 / as_fraction(alpha)) - 1


def marginal(scores: Array, alpha: float | Fraction) -> float:
    """The threshold of calibration scores [N] for coverage of 1 - alpha over all classes together."""
    values = _numbers(scores)
    order = order_of(len(values), alpha)
    return float(np.partition(values, order - 1)[order - 1]) if order <= len(values) else math.inf


def per_class(scores: Array, labels: Array, n: int, alpha: float) -> np.ndarray:
    """A threshold for each class from its own samples [n]: coverage of 1 - alpha within every class.

    A class with fewer than ceil(1 / alpha) - 1 samples has an infinite threshold: it is in every set.
    """
    values, labels = _labelled(scores, labels, n)
    return np.array([marginal(values[labels == y], alpha) for y in range(n)])


def per_group(scores: Array, groups: Array, names: Sequence[str], alpha: float) -> Thresholds:
    """A threshold for each group of samples (Mondrian conformal prediction): coverage of 1 - alpha within every group.

    A group with fewer than ceil(1 / alpha) - 1 samples has an infinite threshold: its sets hold all classes.

    Args:
        scores: of the calibration samples' labels [N].
        groups: the number of each sample's group [N].
        names: of the groups; one may have no samples.
        alpha: see :func:`marginal`.
    """
    values, given = _labelled(scores, groups, len(names))
    return Thresholds(np.array([marginal(values[given == g], alpha) for g in range(len(names))]), None, tuple(names))


def per_node(scores: Array, labels: Array, n: int, alpha: float, *, parents: Sequence[int]) -> np.ndarray:
    """A threshold for each class [n], from its own samples or those around it in a tree.

    A class with at least ceil(1 / alpha) - 1 samples has its own threshold, and coverage of 1 - alpha. A rarer class
    takes that of the smallest node around it with so many samples, where 1 - alpha holds for all samples of the node
    together, and not for each of its classes. Where the root has too few, the threshold is infinite.

    Args:
        scores, labels: of the calibration samples [N].
        n: number of classes.
        alpha: see :func:`marginal`.
        parents: the parent of each node, as of :class:`topk_studies.old_trainer.oldsets.Tree`.
    """
    values, labels = _labelled(scores, labels, n)
    inside: list[list[np.ndarray]] = [[] for _ in parents]
    for y in range(n):
        inside[y].append(values[labels == y])
    for node, parent in enumerate(parents):
        if parent >= 0:
            inside[parent] += inside[node]
    own = [marginal(np.concatenate(parts), alpha) for parts in inside]
    enough = [sum(map(len, parts)) >= max(1, fewest(alpha)) for parts in inside]
    nodes = []
    for y in range(n):
        node = y
        while not enough[node] and parents[node] >= 0:
            node = parents[node]
        nodes.append(node)
    return np.array([own[node] if enough[node] else math.inf for node in nodes])


def interpolated(
    scores: Array, labels: Array, n: int, alpha: float, *, share: float = 0.5, largest: float = math.inf
) -> np.ndarray:
    """``share`` of the class's own threshold and the rest of the common one [n] (Interp-Q, Ding et al. 2025).

    Each threshold is at least the smaller of the two, so labels are missed with probability at most 2 alpha. Infinite
    thresholds are cut to ``largest``, the bound of the score; where that is infinite, to the largest calibration score,
    which costs another 1 / (N + 1). Those of minus infinity are raised to the smallest calibration score above it.

    Args:
        scores, labels: of the calibration samples [N].
        n: number of classes.
        alpha: see :func:`marginal`.
        share: 0 is :func:`marginal`, 1 is :func:`per_class`.
        largest: a bound of the score.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share must be in [0, 1], got {share!r}")
    values, labels = _labelled(scores, labels, n)
    finite = values[np.isfinite(values)]
    high = largest if math.isfinite(largest) else float(finite.max(initial=-math.inf))
    own, common = per_class(values, labels, n, alpha).clip(max=high), min(marginal(values, alpha), high)
    if share in (0, 1):  # nothing is weighed, and 0 times infinity is no number
        return own if share else np.full(n, common)
    low = finite.min() if len(finite) else -math.inf
    return share * own.clip(min=low) + (1 - share) * max(common, low)


def clustered(
    scores: Array, labels: Array, n: int, alpha: float, *, clusters: int | None = None, seed: int = 0
) -> np.ndarray:
    """A threshold for each cluster of classes with like scores [n] (Ding et al. 2023).

    A part of the samples, drawn at random, groups the classes by the quantiles of their scores, and the rest gives each
    group its threshold. Classes too rare to be placed, and groups too small, take the common threshold.

    Args:
        scores, labels: of the calibration samples [N].
        n: number of classes.
        alpha: see :func:`marginal`.
        clusters: how many; None: the paper's rule.
        seed: of the split and of the clustering.
    """
    values, labels = _labelled(scores, labels, n)
    rng = np.random.default_rng(seed)
    least = fewest(alpha)
    counts = np.bincount(labels, minlength=n)
    smallest = max(int(counts.min()), least)
    frequent = int((counts >= smallest).sum())
    drawn = smallest * frequent / (75 + frequent)  # the paper's balance of samples between the two purposes
    clusters = int(drawn / 2) if clusters is None else clusters
    part = rng.random(len(values)) < drawn / smallest
    group = _groups(values[part], labels[part], n, least, clusters, rng)
    rest, rest_group = values[~part], group[labels[~part]]
    common = marginal(rest, alpha)
    per_group = [marginal(rest[rest_group == g], alpha) for g in range(group.max() + 1)]
    own = np.array([value if value < math.inf else common for value in per_group] + [common])
    return own[group]  # group -1, the classes without one, is the last entry


def _groups(
    values: np.ndarray, labels: np.ndarray, n: int, least: int, clusters: int, rng: np.random.Generator
) -> np.ndarray:
    """The cluster of each class [n]; -1 for those with fewer than ``least`` samples."""
    group = np.full(n, -1)
    counts = np.bincount(labels, minlength=n)
    placed = np.flatnonzero(counts >= max(least, 1))
    if clusters < 2 or len(placed) <= clusters:
        return group
    finite = values[np.isfinite(values)]
    if not len(finite):
        return group
    values = values.clip(finite.min(), finite.max())  # distances to infinite scores are no numbers
    orders = [[math.ceil(q * counts[y]) - 1 for q in QUANTILES] for y in placed]
    points = np.stack([np.sort(values[labels == y])[order] for y, order in zip(placed, orders, strict=True)])
    group[placed] = weighted_kmeans(points, np.sqrt(counts[placed]), clusters, rng)
    return group


def rc3p(scores: Array, ranks: Array, labels: Array, n: int, alpha: float) -> Thresholds:
    """A threshold and a largest rank for each class (Shi et al. 2024): coverage of 1 - alpha within every class.

    The largest rank of a class is the smallest k with a top-k error e below alpha among its samples; its threshold then
    allows misses of alpha - e. Where that is too little for the class's samples the threshold is infinite, and the rank
    alone is the limit. A class with fewer than ceil(1 / alpha) - 1 samples has no limit of either kind.

    The paper's guarantee is for the population's top-k errors; with those of few samples coverage can fall short.

    Args:
        scores, ranks, labels: of the calibration samples' labels [N].
        n: number of classes.
        alpha: see :func:`marginal`.
    """
    share = as_fraction(alpha)
    values, labels = _labelled(scores, labels, n)
    places = as_numpy(ranks)
    own, limit = np.full(n, math.inf), np.full(n, n)
    for y in np.flatnonzero(np.bincount(labels, minlength=n) >= max(1, fewest(alpha))):
        mine = np.sort(places[labels == y])
        allowed = math.ceil(share * len(mine)) - 1  # the most samples beyond the rank, a share below alpha
        limit[y] = mine[len(mine) - 1 - allowed]
        missed = int((mine > limit[y]).sum())
        own[y] = marginal(values[labels == y], share - Fraction(missed, len(mine)))
    return Thresholds(own, limit)


def average_size(scores: Array, size: float) -> float:
    """The threshold with which sets of these rows [N, n] have ``size`` classes on average (Lorieul et al. 2021).

    Scores that are equal can make sets larger. Where sets may not be empty the smallest mean size is 1.

    The fair rival of the top k: the same number of answers, spent where they help. It promises a size, not a coverage.
    """
    values = _numbers(scores)
    count, n = values.shape
    if not 0 < size <= n:
        raise ValueError(f"the mean size must be above 0 and at most the {n} classes, got {size!r}")
    wanted = max(1, round(count * size))
    return float(np.partition(values, wanted - 1, axis=None)[wanted - 1])


def check_labels(labels: Array, n: int) -> np.ndarray:
    """The labels as int64, or an error that names the first that is no class of 0 to n - 1."""
    given = as_numpy(labels)
    if given.ndim != 1 or not np.issubdtype(given.dtype, np.integer):
        raise ValueError(f"labels must be class indices [N], integer, got {given.dtype} {list(given.shape)}")
    wrong = (given < 0) | (given >= n)
    if wrong.any():
        raise ValueError(f"the data has label {given[wrong][0]}, but the model has the classes 0 to {n - 1}")
    return given.astype(np.int64)


def _numbers(scores: Array) -> np.ndarray:
    """The scores as an array, or an error that counts those that are NaN."""
    values = as_numpy(scores)
    if np.isnan(values).any():
        raise ValueError(f"{int(np.isnan(values).sum())} of {values.size} calibration scores are NaN")
    return values


def _labelled(scores: Array, labels: Array | Sequence[int], n: int) -> tuple[np.ndarray, np.ndarray]:
    values, given = as_numpy(scores), check_labels(labels, n)
    if values.shape != given.shape:
        raise ValueError(f"expected one score a label, got {list(values.shape)} scores and {list(given.shape)} labels")
    return values, given
