"""How often a sample comes in an epoch, by the frequency of its class.

A law gives each sample an expected number of copies. :class:`Draw` draws an epoch with these expectations, by
systematic sampling: the samples stand in a row, class by class and in random order within each, and each takes a
stretch as long as its expected copies. Marks at equal distances, from a random start, pick the samples. So a sample,
and a class, gets its expectation rounded down or up, and the right one on average. Then the epoch is shuffled.
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from topk_registry.data.labels import Labels
from topk_studies.old_trainer.data.recipes import Indices

Copies = NDArray[np.float64]


class Draw:
    """Epochs of samples, drawn by an expected number of copies each.

    Args:
        labels: the class of each sample [N].
        copies: how often each sample comes in an epoch, on average [N].

    An epoch has as many samples as the copies add up to, rounded down.
    """

    def __init__(self, labels: Labels, copies: Copies) -> None:
        self.labels, self.copies = labels, copies
        total = float(copies.sum())
        self.length = math.floor(total + 1e-6)  # sums of shares are whole numbers up to rounding
        self.distance = total / self.length

    def __len__(self) -> int:
        return self.length

    def __call__(self, rng: np.random.Generator) -> Indices:
        """The samples of an epoch [M], in random order."""
        row = rng.permutation(len(self.labels))
        row = row[np.argsort(self.labels[row], kind="stable")]
        ends = np.cumsum(self.copies[row])
        marks = (rng.random() + np.arange(self.length)) * self.distance
        places = np.minimum(
            np.searchsorted(ends, marks, side="right"), len(row) - 1
        )  # the last end may be rounded down
        return rng.permutation(row[places])


def expected_copies(labels: Labels, law: str, *, beta: float = 0.999, threshold: float = 0.001) -> Copies:
    """How often each sample comes in an epoch, on average [N].

    With n_c samples of class c among N:

    - ``class_balanced``: each class that has samples is as frequent as any other, a sample comes in proportion to
      1 / n_c (Kang et al. 2020);
    - ``sqrt``: in proportion to n_c^(-1/2) (Mahajan et al. 2018);
    - ``effective_num``: in proportion to (1 - beta) / (1 - beta^n_c) (Cui et al. 2019);
    - ``repeat_factor``: max(1, sqrt(threshold N / n_c)) times, so that an epoch grows (Gupta et al. 2019).

    The first three keep the length of the epoch, N.
    """
    if law not in LAWS:
        raise ValueError(f"the law must be one of {', '.join(LAWS)}, got {law!r}")
    if not 0.0 < beta < 1.0:
        raise ValueError(f"beta must be in (0, 1), got {beta!r}")
    if not 0.0 < threshold <= 1.0:
        raise ValueError(f"the threshold must be in (0, 1], got {threshold!r}")
    alike = np.bincount(labels)[labels].astype(np.float64)  # samples of the same class
    copies = LAWS[law](alike, beta, threshold)
    return copies if law == "repeat_factor" else copies * (len(labels) / copies.sum())


def _class_balanced(alike: Copies, beta: float, threshold: float) -> Copies:
    return 1.0 / alike


def _sqrt(alike: Copies, beta: float, threshold: float) -> Copies:
    return alike**-0.5


def _effective_num(alike: Copies, beta: float, threshold: float) -> Copies:
    return (1.0 - beta) / -np.expm1(alike * math.log(beta))


def _repeat_factor(alike: Copies, beta: float, threshold: float) -> Copies:
    return np.maximum(1.0, np.sqrt(threshold * len(alike) / alike))


LAWS: dict[str, Callable[[Copies, float, float], Copies]] = {
    "class_balanced": _class_balanced,
    "sqrt": _sqrt,
    "effective_num": _effective_num,
    "repeat_factor": _repeat_factor,
}
