"""Prediction sets: calibrate on held-out logits, then call on new logits.

The best class is in every set, whatever the threshold t, so the set of a sample is {y: c(y) <= t} where c is the score,
but minus infinity for the best class. Thresholds are order statistics of c at the labels, so the guarantee of split
conformal prediction holds for these sets.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from topk_registry.conformal.scores import Score, probabilities
from topk_registry.conformal.thresholds import LEVELS, RULES, as_fraction, check_labels, fewest, threshold_table


@dataclass(frozen=True)
class PredictionSets:
    """Sets of the classes whose score is at most a calibrated threshold.

    Args:
        score: score of a class.
        levels: miscoverage levels, ascending [G].
        table: threshold of each level [G, 1], or of each level and class [G, n]. Infinite: any score.
        alpha: default level.
        temperature: divides the logits before softmax.
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
        """Return the thresholds of the largest level that is at most ``alpha`` [1] or [n].

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

        A sample with NaN or infinite logits, whose probabilities are not numbers, gets all classes.

        Args:
            logits: [B, n].
            alpha: miscoverage level; default: the level of the calibration.
            allowed: classes that a set may contain, bool [n] or [B, n].
        """
        p = probabilities(logits, self.temperature)
        inside = label_scores(self.score, p) <= self.thresholds(alpha)
        inside |= np.isnan(p).any(-1, keepdims=True)
        return inside if allowed is None else inside & np.asarray(allowed, bool)


def label_scores(score: Score, p: np.ndarray) -> np.ndarray:
    """Return the scores that thresholds are compared with [B, n]: minus infinity for the best class."""
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
        logits: [N, n], of samples used neither in training nor in the choice of the model.
        labels: labels of the same samples [N].
        alpha: default miscoverage level; added to ``levels`` if absent.
        score: a name from ``SCORES``, or a :class:`Score` with options.
        rule: ``"marginal"``: one threshold; ``"per-class"``: one per class, and the guarantee holds within each class.
        temperature: divides the logits.
        levels: miscoverage levels that the sets support.
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
    """Return the ascending levels with ``alpha`` among them."""
    return tuple(sorted({*levels, alpha}))


def check_size(count: int, alpha: float) -> None:
    """Raise ValueError if ``count`` calibration samples are too few for a finite threshold at ``alpha``."""
    if count < fewest(alpha):
        raise ValueError(
            f"{count} calibration samples are too few for alpha {alpha:g}: at least {fewest(alpha)} are needed"
        )


def guarantee(rule: str, alpha: float) -> str:
    """Return the guarantee of a rule in words."""
    coverage = f"at least {float(1 - as_fraction(alpha)):g}"
    if rule == "per-class":
        return f"within each class, the set contains the true class with probability {coverage}"
    return f"the set contains the true class with probability {coverage}, averaged over all classes"
