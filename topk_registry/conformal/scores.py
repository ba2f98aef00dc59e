"""Nonconformity scores, computed from the logarithms of softmax probabilities.

A nonconformity score is one number per class. The score is high if the class fits the sample badly. A prediction set
contains the classes with a score of at most a threshold. There are three formulas for the score of class y. p_y is the
probability of class y. p_(1) is the largest probability of the sample, p_(2) the second largest, and so on. r is the
rank of class y: the most probable class has rank 1. If two classes have equal probabilities, the class with the lower
index gets the lower rank.

    lac     -log(p_y)                                  Sadinle et al. 2019, who use 1 - p_y
    aps     p_(1) + ... + p_(r)                        Romano et al. 2020
    raps    aps + penalty * max(0, r - k_reg)          Angelopoulos et al. 2021

-log(p) and 1 - p have the same order, so they give the same sets. But in single precision, 1 - p rounds to 1 for all
probabilities below 3e-8, so that the classes of an overconfident network tie. -log(p) has no such ties.

``penalty`` and ``k_reg`` are arguments of :class:`Score`. In the papers, ``aps`` and ``raps`` also have a random term.
This module omits the random term, so the same logits always give the same set. With ``aps`` and ``raps``, classes with
a rank above 1000 have an infinite score, because some ONNX runtimes can only sort a few thousand numbers.
"""

import math
from dataclasses import dataclass

import numpy as np

SCORES = ("lac", "aps", "raps")
MAX_RANK = 1000  # ONNX runtimes on accelerators can sort a few thousand entries at most


def probabilities(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Return softmax(logits / temperature) over the last axis.

    The result is float64 for logits in float64, and float32 for logits of any other dtype. If a row of logits contains
    NaN or +inf, or if all its logits are -inf, the whole row of the result is NaN.
    """
    e = np.exp(_shifted(logits, temperature))
    return e / e.sum(-1, keepdims=True)


def log_probabilities(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Return the logarithm of softmax(logits / temperature), as :func:`probabilities` returns the softmax.

    The logarithm is finite for all finite logits, although the probability may be too small for floating-point numbers.
    """
    z = _shifted(logits, temperature)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def _shifted(logits: np.ndarray, temperature: float) -> np.ndarray:
    """Return (logits - largest logit of the row) / temperature. A row with NaN or +inf becomes NaN."""
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be above 0 and finite, got {temperature!r}")
    z = np.asarray(logits)
    if z.dtype not in (np.float32, np.float64):
        z = z.astype(np.float32)
    with np.errstate(invalid="ignore"):  # a row of infinities becomes NaN
        return (z - z.max(-1, keepdims=True)) / np.asarray(temperature, z.dtype)


@dataclass(frozen=True)
class Score:
    """A formula for the nonconformity score of a class: a number that is high if the class fits the sample badly.

    Let p be the probability of the class, and r the rank of the class: the most probable class has r = 1. ``lac`` is
    -log(p). ``aps`` is the sum of the r largest probabilities. ``raps`` is ``aps`` plus penalty * max(0, r - k_reg).

    Args:
        name: ``"lac"``, ``"aps"`` or ``"raps"``.
        penalty: factor in the formula of ``raps``. The other scores ignore this argument.
        k_reg: largest rank without a penalty, in the formula of ``raps``. The other scores ignore this argument.
    """

    name: str = "lac"
    penalty: float = 0.01
    k_reg: int = 5

    def __post_init__(self) -> None:
        if self.name not in SCORES:
            raise ValueError(f"score must be one of {', '.join(SCORES)}, got {self.name!r}")
        if not 0 <= self.penalty < math.inf:
            raise ValueError(f"penalty must be a finite number of at least 0, got {self.penalty!r}")
        if self.k_reg < 0 or int(self.k_reg) != self.k_reg:
            raise ValueError(f"k_reg must be an integer of at least 0, got {self.k_reg!r}")

    def __call__(self, log_p: np.ndarray) -> np.ndarray:
        """Return the score of every class of every sample [B, n], from :func:`log_probabilities` [B, n]."""
        if self.name == "lac":
            return -log_p
        p = np.exp(log_p)
        order = np.argsort(-p, axis=-1, kind="stable")[:, :MAX_RANK]
        ordered = np.cumsum(np.take_along_axis(p, order, -1), -1, dtype=p.dtype) + self.rank_penalty(order.shape[1])
        scores = np.full_like(p, np.inf)
        np.put_along_axis(scores, order, ordered.astype(p.dtype), -1)
        return scores

    def rank_penalty(self, count: int) -> np.ndarray:
        """Return the array of penalty * max(0, r - k_reg) for the ranks r = 1, ..., ``count``.

        Only ``raps`` has a penalty. For the other scores, the array contains zeros.
        """
        beyond = np.maximum(np.arange(1, count + 1) - self.k_reg, 0)
        return beyond * (self.penalty if self.name == "raps" else 0.0)

    @property
    def options(self) -> dict[str, float]:
        """For ``raps``, a dictionary with ``penalty`` and ``k_reg``. For the other scores, an empty dictionary."""
        return {"penalty": self.penalty, "k_reg": self.k_reg} if self.name == "raps" else {}
