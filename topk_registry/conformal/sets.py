"""Computation of prediction sets from logits, and calibration of the thresholds of the sets.

The set of a sample contains each class y with c(y) <= t, where t is a threshold. c(y) is the nonconformity score of
class y, which is high if the class fits the sample badly. One exception: c(y) is -inf for the class with the largest
probability. Therefore every set contains the most probable class.

Calibration computes c(true class) for each of N samples. For the miscoverage level alpha, the threshold is the j-th
smallest of these N numbers, where j = ceil((N + 1)(1 - alpha)). With this threshold, the set of a new sample contains
the true class with probability at least 1 - alpha.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from topk_registry.conformal.scores import Score, log_probabilities
from topk_registry.conformal.thresholds import LEVELS, RULES, as_fraction, check_labels, fewest, threshold_table


@dataclass(frozen=True)
class PredictionSets:
    """An object that computes the prediction sets of new samples. :func:`calibrate` creates this object.

    A nonconformity score is computed for each class. The score is high if the class fits the sample badly. The set of
    a sample contains each class whose score is at most the threshold. The set always contains the class with the
    largest logit. A miscoverage level is the allowed probability that the set does not contain the true class.

    Args:
        score: formula of the nonconformity score.
        levels: miscoverage levels in ascending order: [G].
        table: thresholds, with one row per level: [G, 1] if all classes share one threshold, or [G, n] for one
            threshold per class. If a threshold is infinite, the set contains all classes with this threshold.
        alpha: miscoverage level that a call uses by default.
        temperature: number by which logits are divided before softmax.
    """

    score: Score
    levels: tuple[float, ...]
    table: np.ndarray
    alpha: float = 0.1
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if list(self.levels) != sorted(set(self.levels)) or self.table.shape[:1] != (len(self.levels),):
            raise ValueError(f"expected ascending levels and one row of thresholds per level, got {self.table.shape}")
        if np.isnan(self.table).any():
            raise ValueError("thresholds must be numbers, got NaN")

    @property
    def rule(self) -> str:
        return RULES[self.table.shape[1] > 1]

    def thresholds(self, alpha: float | None = None) -> np.ndarray:
        """Return the thresholds. A prediction set contains each class whose score is at most the threshold.

        The result is [n] if each class has its own threshold, and [1] if all classes share one. If ``self.levels``
        does not contain ``alpha``, the next lower level is used. If ``alpha`` is None, ``self.alpha`` is used.

        Raises:
            ValueError: ``alpha`` is below the lowest level or above the highest level.
        """
        wanted = self.alpha if alpha is None else alpha
        if not self.levels[0] <= wanted <= self.levels[-1]:
            raise ValueError(f"alpha must be from {self.levels[0]:g} to {self.levels[-1]:g}, got {wanted!r}")
        return self.table[np.searchsorted(self.levels, wanted, side="right") - 1]

    def __call__(
        self, logits: np.ndarray, *, alpha: float | None = None, allowed: np.ndarray | None = None
    ) -> np.ndarray:
        """Return the prediction set of each sample: bool [B, n], True for the classes in the set.

        If a logit of a sample is NaN or +inf, the set of the sample contains all classes that ``allowed`` permits.

        Args:
            logits: [B, n].
            alpha: miscoverage level. Default: the attribute ``alpha``.
            allowed: True for classes that a set may contain: bool [n], or [B, n] for different classes per sample.
                All other classes are removed from the set. The allowed class with the largest probability is in the
                set. Default: all classes.
        """
        log_p = log_probabilities(logits, self.temperature)
        inside = label_scores(self.score, log_p) <= self.thresholds(alpha)
        inside |= np.isnan(log_p).any(-1, keepdims=True)
        if allowed is None:
            return inside
        permitted = np.broadcast_to(np.asarray(allowed, bool), inside.shape)
        best = np.where(permitted, log_p, -np.inf).argmax(-1)[:, None]
        np.put_along_axis(inside, best, True, -1)
        return inside & permitted


def label_scores(score: Score, log_p: np.ndarray) -> np.ndarray:
    """Return the nonconformity scores [B, n] for logarithms of probabilities [B, n].

    A set contains the classes with low scores.

    The class with the largest probability has the score -inf, so every set contains this class. If a probability of a
    sample is NaN, all scores of the sample are NaN.
    """
    scores = score(log_p)
    np.put_along_axis(scores, log_p.argmax(-1)[:, None], -np.inf, -1)
    scores[np.isnan(log_p).any(-1)] = np.nan
    return scores


def calibrate(
    logits: np.ndarray,
    labels: np.ndarray,
    *,
    alpha: float = 0.1,
    score: str | Score = "lac",
    rule: str = "marginal",
    temperature: float = 1.0,
    levels: Sequence[float] = LEVELS,
) -> PredictionSets:
    """Compute the thresholds of prediction sets that contain the true class with probability at least 1 - alpha.

    Args:
        logits: logits of N calibration samples: [N, n]. Neither training nor model selection may have used these
            samples.
        labels: class indices of the same samples: [N].
        alpha: allowed probability that a set does not contain the true class (miscoverage level). A call of the
            result uses this level by default. The level is added to ``levels``.
        score: ``"lac"``, ``"aps"``, ``"raps"``, or a :class:`Score` with options.
        rule: With ``"marginal"``, all classes share one threshold, and the probability is an average over all classes.
            With ``"per-class"``, each class has its own threshold, and the probability holds for each true class.
        temperature: number by which logits are divided before softmax.
        levels: miscoverage levels for which thresholds are computed. A call of the result can select one by ``alpha``.

    Raises:
        ValueError: an argument is invalid, or there are fewer than ceil(1 / alpha) - 1 samples.
    """
    logits = np.asarray(logits)
    labels = check_labels(labels, logits.shape[-1])
    if len(labels) != len(logits):
        raise ValueError(f"expected one label per sample, got {len(labels)} for {len(logits)}")
    check_size(len(labels), alpha)
    score = Score(score) if isinstance(score, str) else score
    scores = label_scores(score, log_probabilities(logits, temperature))[np.arange(len(labels)), labels]
    grid = all_levels(alpha, levels)
    table = threshold_table(scores, labels, logits.shape[-1], rule=rule, levels=grid)
    return PredictionSets(score, grid, table, alpha, temperature)


def all_levels(alpha: float, levels: Sequence[float] = LEVELS) -> tuple[float, ...]:
    """Return ``levels`` and ``alpha`` in ascending order, without repeated values."""
    return tuple(sorted({*levels, alpha}))


def check_size(count: int, alpha: float) -> None:
    """Raise ValueError if ``count`` is below ceil(1 / alpha) - 1: with so few samples, all thresholds are infinite."""
    if count < fewest(alpha):
        raise ValueError(
            f"{count} calibration samples are too few for alpha {alpha:g}: at least {fewest(alpha)} are needed"
        )


def guarantee(rule: str, alpha: float) -> str:
    """Return a sentence such as "within each class, the set contains the true class with probability at least 0.9"."""
    coverage = f"at least {float(1 - as_fraction(alpha)):g}"
    if rule == "per-class":
        return f"within each class, the set contains the true class with probability {coverage}"
    return f"the set contains the true class with probability {coverage}, averaged over all classes"
