"""Generated feature vectors with a known probability of each class, so that the lowest possible error is known.

The classes form families, and the samples of different classes overlap. Each family has a random code, a vector of d
numbers -1 or 1. The code of a class is the code of the family with some signs flipped. A sample of class c is drawn
around the code of c. With the probability a (``ambiguity``), the sample is instead drawn around the code of the family,
and then contains no information about the class within the family. The probability of the features x is

    p(x | c) = (1 - a) q(x | code_c) + a q(x | code_family),        q(x | u) = Gaussian(u, feature_noise^2 I), in 8 bits

The features are rounded to 8 bits and stored as the pixels of a small image, so that any image pipeline preserves the
features. The rounding is part of q, so the probability of each class given x is exact. All numbers of a code u are -1
or 1, so log q(x | u) = g + b u, where the number g and the vector b depend only on x. Therefore one product of the
vectors b with the matrix of all codes gives the probabilities of all classes, even of 10,000.
"""

from math import erfc, log, sqrt

import numpy as np
from numpy.typing import NDArray

from topk_registry.data.drawn import BLOCK, SPLITS, DrawnImages, check_counts, check_numbers, draw, split_and_size

TINY = 1e-300  # lower bound on the probability of a level; smaller probabilities do not change any sum
REACH = 4.0  # the 256 levels reach this many standard deviations of the noise beyond the means -1 and 1

Matrix = NDArray[np.float64]


class Ambiguous(DrawnImages):
    """Generated feature vectors in classes that overlap, with the exact probability of each class given the features.

    There are ``families * fine`` classes. Class c belongs to family c mod ``families``. Each family has a random code,
    a vector of numbers -1 or 1. The code of a class is the code of its family with some signs flipped. The features of
    a sample are the code of the class or of the family, plus Gaussian noise.

    Args:
        split: ``"train"``, ``"validation"`` or ``"test"``.
        size: number of samples. None: 5000 for the split ``"train"``, and 2000 for the other splits.
        eval_size: number of samples in the splits other than ``"train"``. None: ``size``.
        seed: seed of the codes and of every sample. With a larger ``size``, the first samples stay the same.
        families: number of families.
        fine: number of classes per family.
        side: height and width of the image that stores the features. There are d = 3 side^2 features.
        spread: probability that a sign in the code of a class differs from the code of the family.
        feature_noise: standard deviation of the Gaussian noise. Where two codes differ, the difference is 2.
        ambiguity: share of samples whose features are the code of the family plus noise.
        imbalance: frequency of the first class divided by the frequency of the last class. In between, frequencies fall
            exponentially.
        label_noise: share of labels that are redrawn from the classes of the family, in every split. The new label can
            equal the old label.

    Example:
        >>> data = Ambiguous("test", size=100)
        >>> image, label = data[0]
        >>> data.posterior().shape
        (100, 100)
    """

    def __init__(
        self,
        split: str = "train",
        *,
        size: int | None = None,
        eval_size: int | None = None,
        seed: int = 0,
        families: int = 20,
        fine: int = 5,
        side: int = 8,
        spread: float = 0.1,
        feature_noise: float = 5.0,
        ambiguity: float = 0.2,
        imbalance: float = 1.0,
        label_noise: float = 0.0,
    ) -> None:
        split, size = split_and_size(split, size, eval_size)
        check_counts(families=families, fine=fine, side=side)
        check_numbers(
            spread=(spread, "[0, 1]"),
            feature_noise=(feature_noise, "(0, inf)"),
            ambiguity=(ambiguity, "[0, 1]"),
            imbalance=(imbalance, "[1, inf)"),
            label_noise=(label_noise, "[0, 1]"),
        )
        if families * fine < 2:
            raise ValueError(f"need at least 2 classes, got {families=}, {fine=}")
        n = families * fine
        self.side, self.fine, self.noise = side, fine, feature_noise
        self.ambiguity, self.label_noise = ambiguity, label_noise
        self.superclasses = [c % families for c in range(n)]
        self.classes = [f"code {c % families:02d}-{c // families}" for c in range(n)]
        self._family = np.arange(n) % families
        rng = np.random.default_rng([seed, 0])
        self._family_codes = rng.choice([-1.0, 1.0], (families, 3 * side * side))
        flips = np.where(rng.random((n, 3 * side * side)) < spread, -1.0, 1.0)
        self._codes = self._family_codes[self._family] * flips
        falling = imbalance ** -(np.arange(n) / (n - 1))
        self._prior = falling / falling.sum()
        self._scale = 127.5 / (1.0 + REACH * feature_noise)
        self.images, labels = draw(size, [seed, SPLITS[split]], self._block)
        self.targets = labels.tolist()

    @property
    def frequencies(self) -> Matrix:
        """Probability of each label [n] without knowledge of the features. Label noise is included."""
        return self._with_label_noise(self._prior[None])[0]

    def posterior(self) -> Matrix:
        """Return the exact probability of each label given the features, for all N samples [N, n].

        The probabilities take label noise into account.
        """
        rows = self.images.reshape(-1, 3 * self.side**2)
        return np.concatenate([self._posterior(rows[i : i + BLOCK]) for i in range(0, len(rows), BLOCK)])

    def bayes_error(self, k: int, *, macro: bool = False) -> float:
        """Return the lowest expected top-k error that a classifier can reach on these samples.

        The expectation is over the labels of the samples, given the features.

        Args:
            k: number of classes that the classifier predicts per sample.
            macro: if True, the error is the mean over classes, else the mean over samples.
        """
        gain = self.posterior() * (1.0 / (len(self.classes) * self.frequencies) if macro else 1.0)
        return 1.0 - float(np.sort(gain, axis=1)[:, -k:].sum(1).mean())

    def _block(self, rng: np.random.Generator, first: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        n, families = len(self._prior), len(self._family_codes)
        label = np.searchsorted(self._prior.cumsum(), rng.random(BLOCK) * self._prior.sum()).clip(max=n - 1)
        around_family = rng.random(BLOCK) < self.ambiguity
        code = np.where(around_family[:, None], self._family_codes[self._family[label]], self._codes[label])
        features = code + self.noise * rng.standard_normal(code.shape)
        levels = np.clip(np.rint(127.5 + self._scale * features), 0, 255).astype(np.uint8)
        redrawn = self._family[label] + families * rng.integers(self.fine, size=BLOCK)
        label = np.where(rng.random(BLOCK) < self.label_noise, redrawn, label)
        return levels.reshape(BLOCK, self.side, self.side, 3), label

    def _posterior(self, rows: NDArray[np.uint8]) -> Matrix:
        table = np.array([_log_levels(127.5 + self._scale * u, self._scale * self.noise) for u in (-1.0, 1.0)])
        slope = 0.5 * (table[1] - table[0])[rows]  # [b, d]: log q(x | u) = constant + slope u, because u is -1 or 1
        own, family = slope @ self._codes.T, (slope @ self._family_codes.T)[:, self._family]  # [b, n]
        with np.errstate(divide="ignore"):  # log 0 for an ambiguity of 0 or 1
            likelihood = np.logaddexp(np.log1p(-self.ambiguity) + own, np.log(self.ambiguity) + family)
        joint = likelihood + np.log(self._prior)
        joint = np.exp(joint - joint.max(axis=1, keepdims=True))
        return self._with_label_noise(joint / joint.sum(axis=1, keepdims=True))

    def _with_label_noise(self, clean: Matrix) -> Matrix:
        # the probabilities [.., n] of the labels after label noise within families
        by_family = clean.reshape(len(clean), self.fine, -1).sum(axis=1)  # class c belongs to family c mod families
        return (1.0 - self.label_noise) * clean + self.label_noise / self.fine * by_family[:, self._family]


def _log_levels(mean: float, deviation: float) -> list[float]:
    # the log probability of each of the 256 levels; the first and the last level include the tails
    edges = [-float("inf"), *(level + 0.5 for level in range(255)), float("inf")]
    return [log(max(_between(edges[v] - mean, edges[v + 1] - mean, deviation), TINY)) for v in range(256)]


def _between(low: float, high: float, deviation: float) -> float:
    # the probability that a Gaussian with mean 0 is between two numbers, precise in the tails too
    if low + high < 0:
        low, high = -high, -low
    return 0.5 * (erfc(low / (deviation * sqrt(2))) - erfc(high / (deviation * sqrt(2))))
