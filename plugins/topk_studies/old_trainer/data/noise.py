"""Wrong labels as they come about: anywhere, by the confusions of a weaker model, or by annotators of unequal care.

Each function returns new labels of which exactly ``round(share * N)`` differ from those given, drawn from a seed.
(``noisy_labels`` redraws a share within families, as a paper does, so that some stay.)
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Resampling
from tqdm import tqdm

from topk_registry.data.labels import Labels
from topk_studies.old_trainer.data.recipes import Indices

SIDE = 4  # of the images that the weaker model sees: it must confuse classes that look alike from afar
RIDGE = 0.1  # of the mean variance, added to its covariance, which few images do not determine
SLOW = 20_000  # images whose reading takes long enough for a bar
Matrix = NDArray[np.float64]


class Annotator(NamedTuple):
    """Somebody who labels a share of the samples.

    Args:
        rate: how often a label is wrong, beside the other annotators.
        favourite: share of the wrong labels that are one class of the family, the same for every sample of a class.
        family: share that are any class of the family; the rest are classes anywhere.
    """

    rate: float
    favourite: float
    family: float


# each labels a fifth: two careful, two who mix up one pair of classes, one who clicks at random
ANNOTATORS = (
    Annotator(1.0, 0.2, 0.7),
    Annotator(1.0, 0.2, 0.7),
    Annotator(3.0, 0.7, 0.2),
    Annotator(3.0, 0.7, 0.2),
    Annotator(6.0, 0.0, 0.2),
)


def uniform_labels(labels: Labels, num_classes: int, share: float, *, seed: int) -> Labels:
    """Labels [N], a share of them replaced by any other class, all alike."""
    rng = _drawn(seed, share, num_classes)
    wrong = rng.permutation(len(labels))[: round(share * len(labels))]
    noisy = labels.copy()
    noisy[wrong] = _elsewhere(rng, labels[wrong], num_classes)
    return noisy


def confused_labels(labels: Labels, log_p: Matrix, share: float, *, seed: int) -> Labels:
    """Labels [N], a share of them replaced by a class that a model takes the sample for.

    Samples whose label the model doubts are wrong more often, with odds in proportion to the probability that it gives
    to all other classes; and each gets one of these classes by their probabilities.

    Args:
        labels: [N].
        log_p: logarithms of the model's probabilities [N, n], see :func:`weaker_model`.
        share: of the labels that become wrong, in [0, 1].
        seed: of the draw.
    """
    rng = _drawn(seed, share, log_p.shape[1])
    rows = np.arange(len(labels))
    doubt = np.log(np.maximum(-np.expm1(np.minimum(log_p[rows, labels], 0.0)), 1e-12))
    wrong = np.argsort(-(doubt + rng.gumbel(size=len(labels))), kind="stable")[: round(share * len(labels))]
    others = log_p[wrong] + rng.gumbel(size=(len(wrong), log_p.shape[1]))
    others[np.arange(len(wrong)), labels[wrong]] = -np.inf
    noisy = labels.copy()
    noisy[wrong] = others.argmax(axis=1)
    return noisy


def annotated_labels(
    labels: Labels,
    superclasses: Sequence[int],
    share: float,
    *,
    seed: int,
    annotators: Sequence[Annotator] = ANNOTATORS,
) -> Labels:
    """Labels [N] by several annotators of unequal care, each of an equal part of the samples.

    Args:
        labels: [N].
        superclasses: the family of each class [n]. In a family of one class the wrong labels are anywhere.
        share: of the labels that become wrong, in [0, 1]: of all annotators together.
        seed: of the draw.
        annotators: by default two careful ones, two who take one class for another, and one who clicks at random.
    """
    n, family = len(superclasses), np.asarray(superclasses)
    rng = _drawn(seed, share, n)
    by = rng.permutation(len(labels)) % len(annotators)
    rate, favourite, within = (np.asarray(column)[by] for column in zip(*annotators, strict=True))
    order = np.argsort(-(np.log(rate) + rng.gumbel(size=len(labels))), kind="stable")
    wrong = order[: round(share * len(labels))]
    mates = [np.flatnonzero((family == family[c]) & (np.arange(n) != c)) for c in range(n)]
    liked = np.array([[rng.choice(m) if len(m) else -1 for m in mates] for _ in annotators])
    drawn = np.array([rng.choice(mates[c]) if len(mates[c]) else -1 for c in labels[wrong]], np.int64)
    how = rng.random(len(wrong))
    chosen = np.where(how < favourite[wrong], liked[by[wrong], labels[wrong]], drawn)
    anywhere = (how >= favourite[wrong] + within[wrong]) | (chosen < 0)
    result = labels.copy()
    result[wrong] = np.where(anywhere, _elsewhere(rng, labels[wrong], n), chosen)
    return result


def weaker_model(features: Matrix, labels: Labels, num_classes: int, *, seed: int) -> Matrix:
    """The logarithms of a weak classifier's probabilities [N, n], for samples that it was not fitted to.

    Linear discriminant analysis of each half of the samples tells the classes of the other half. Its scores are divided
    by the temperature under which the labels are likeliest.

    Args:
        features: [N, d], few of them.
        labels: [N].
        num_classes: n.
        seed: of the halves.
    """
    if len(labels) < 2:
        raise ValueError(
            f"a weaker model needs at least 2 samples, a half to fit and a half to tell, got {len(labels)}"
        )
    halves = np.array_split(np.random.default_rng([seed, 19]).permutation(len(labels)), 2)
    scores = np.empty((len(labels), num_classes))
    for fit, rest in (halves, halves[::-1]):
        scores[rest] = _discriminant(features[fit], labels[fit], num_classes, features[rest])
    tried = [_log_softmax(scores / temperature) for temperature in 2.0 ** np.arange(-2.0, 9.0)]
    return max(tried, key=lambda log_p: log_p[np.arange(len(labels)), labels].mean())


def small_images(dataset: Any, indices: Indices, side: int = SIDE) -> Matrix:
    """The images of a data set, shrunk to ``side`` x ``side`` colours, as rows [M, 3 side^2]."""
    transform, dataset.transform = dataset.transform, None
    try:
        rows = [
            np.asarray(dataset[int(i)][0].convert("RGB").resize((side, side), Resampling.BOX)).ravel()
            for i in tqdm(indices, "images for the weaker model", disable=None if len(indices) > SLOW else True)
        ]
    finally:
        dataset.transform = transform
    return np.asarray(rows, np.float64).reshape(len(indices), 3 * side * side)


def _drawn(seed: int, share: float, num_classes: int) -> np.random.Generator:
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"label noise must be in [0, 1], got {share!r}")
    if num_classes < 2:
        raise ValueError(f"wrong labels need at least 2 classes, got {num_classes}")
    return np.random.default_rng([seed, 17])


def _elsewhere(rng: np.random.Generator, labels: Labels, num_classes: int) -> Labels:
    return (labels + rng.integers(1, num_classes, len(labels))) % num_classes


def _discriminant(x: Matrix, labels: Labels, num_classes: int, others: Matrix) -> Matrix:
    """Linear discriminant scores [M, n]; a class without samples has the mean of all."""
    counts = np.bincount(labels, minlength=num_classes)
    centre = x.mean(axis=0)
    sums = np.zeros((num_classes, x.shape[1]))
    np.add.at(sums, labels, x - centre)
    means = sums / np.maximum(counts, 1)[:, None]
    within = x - centre - means[labels]
    covariance = within.T @ within / max(1, len(x))
    covariance += (RIDGE * covariance.trace() / len(covariance) + 1e-9) * np.eye(len(covariance))
    weight = np.linalg.solve(covariance, means.T)  # [d, n]
    prior = np.log((counts + 1) / (counts + 1).sum())
    return (others - centre) @ weight - 0.5 * (means.T * weight).sum(axis=0) + prior


def _log_softmax(scores: Matrix) -> Matrix:
    scores = scores - scores.max(axis=1, keepdims=True)
    return scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
