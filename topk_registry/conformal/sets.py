"""Prediction sets: calibrate on held-out logits, then call on new logits.

Every set contains the class with the largest probability, for any threshold t. So the set of a sample is {y: c(y) <=
t}. c(y) is the nonconformity score of class y, but -inf for the class with the largest probability. The thresholds are
order statistics of c at the labels, so the guarantee of split conformal prediction holds for these sets.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from topk_registry.conformal.scores import Score, probabilities
from topk_registry.conformal.thresholds import LEVELS, RULES, as_fraction, check_labels, fewest, threshold_table


@dataclass(frozen=True)
class PredictionSets:
    """Sets of all classes whose score is at most a calibrated threshold.

    Args:
        score: nonconformity score.
        levels: miscoverage levels in ascending order [G].
        table: threshold per level [G, 1], or per level and class [G, n]. Every score is below an infinite threshold.
        alpha: default level.
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
        """Return the thresholds [1] or [n] for ``alpha``, at the largest level that is at most ``alpha``.

        Raises:
            ValueError: ``alpha`` is outside the levels.
        """
        wanted = self.alpha if alpha is None else alpha
        if not self.levels[0] <= wanted <= self.levels[-1]:
            raise ValueError(f"alpha must be from {self.levels[0]:g} to {self.levels[-1]:g}, got {wanted!r}")
        return self.table[np.searchsorted(self.levels, wanted, side="right") - 1]

    def __call__(
        self, logits: np.ndarray, *, alpha: float | None = None, allowed: np.ndarray | None = None
    ) -> np.ndarray:
        """Return the set of each sample, bool [B, n].

        If a sample has NaN or infinite logits, the set of the sample contains all classes.

        Args:
            logits: [B, n].
            alpha: miscoverage level. Default: the ``alpha`` of the calibration.
            allowed: classes that a set may contain, bool [n] or [B, n].
        """
        p = probabilities(logits, self.temperature)
        inside = label_scores(self.score, p) <= self.thresholds(alpha)
        inside |= np.isnan(p).any(-1, keepdims=True)
        return inside if allowed is None else inside & np.asarray(allowed, bool)


def label_scores(score: Score, p: np.ndarray) -> np.ndarray:
    """Return the scores [B, n] that are compared with the thresholds. The score of the best class is -inf."""
    scores = score(p)
    np.put_along_axis(scores, p.argmax(-1)[:, None], -np.inf, -1)
    scores[np.isnan(p).any(-1)] = np.nan
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
    """Return prediction sets that contain the true class with probability at least 1 - alpha.

    Args:
        logits: [N, n], of samples that were used neither for training nor for model selection.
        labels: labels of the same samples [N].
        alpha: default miscoverage level. If ``levels`` lacks this level, the function adds it.
        score: a name from ``SCORES``, or a :class:`Score` with options.
        rule: ``"marginal"`` for one threshold and a guarantee over all samples, or ``"per-class"`` for a threshold and
            a guarantee per class.
        temperature: number by which logits are divided.
        levels: miscoverage levels that a call of the sets may pass as ``alpha``.
    """
    logits = np.asarray(logits)
    labels = check_labels(labels, logits.shape[-1])
    if len(labels) != len(logits):
        raise ValueError(f"expected one label per sample, got {len(labels)} for {len(logits)}")
    check_size(len(labels), alpha)
    score = Score(score) if isinstance(score, str) else score
    scores = label_scores(score, probabilities(logits, temperature))[np.arange(len(labels)), labels]
    grid = all_levels(alpha, levels)
    table = threshold_table(scores, labels, logits.shape[-1], rule=rule, levels=grid)
    return PredictionSets(score, grid, table, alpha, temperature)


def all_levels(alpha: float, levels: Sequence[float] = LEVELS) -> tuple[float, ...]:
    """Return the levels in ascending order, with ``alpha`` added."""
    return tuple(sorted({*levels, alpha}))


def check_size(count: int, alpha: float) -> None:
    """Raise ValueError if ``count`` calibration samples are too few for a finite threshold at ``alpha``."""
    if count < fewest(alpha):
        raise ValueError(
            f"{count} calibration samples are too few for alpha {alpha:g}: at least {fewest(alpha)} are needed"
        )


def guarantee(rule: str, alpha: float) -> str:
    """Describe the guarantee of a rule in words."""
    coverage = f"at least {float(1 - as_fraction(alpha)):g}"
    if rule == "per-class":
        return f"within each class, the set contains the true class with probability {coverage}"
    return f"the set contains the true class with probability {coverage}, averaged over all classes"
