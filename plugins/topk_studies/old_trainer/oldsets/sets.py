"""Prediction sets from logits: calibrate once, then call.

Sets that may not be empty have the best class whatever the threshold t: the set of a row is {y: s(y) <= t} and its
best class b. That is {y: c(y) <= t} with the counted score c(b) = -inf, and c(y) = s(y) of all others, so that sets
grow with t alone and split conformal prediction holds for c: t is an order statistic of the counted scores of the
labels. With the scores s in their place, samples whose best class is the label would raise t, and are covered without
it.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device

from topk_studies.old_trainer.oldsets.rules import RULES, check_rule, find_thresholds
from topk_studies.old_trainer.oldsets.scores import Array, Score, as_numpy, create_score, inputs_of, ranks
from topk_studies.old_trainer.oldsets.thresholds import Thresholds, check_labels


@dataclass(frozen=True)
class PredictionSets:
    """The classes of each row whose score, and rank, are within calibrated thresholds.

    Args:
        score: of a class.
        thresholds: that a score must not exceed.
        temperature: divides the logits first.
        allow_empty: let sets be empty; otherwise the best class is in every set: the first of the ranking, or, where
            the score is not ranked, all of the smallest score.

    Example:
        >>> sets = calibrate(held_out_logits, labels, alpha=0.1, score="raps")
        >>> sets(logits).sum(-1)  # how many classes each row gets
    """

    score: Score
    thresholds: Thresholds
    temperature: float = 1.0
    allow_empty: bool = False

    def __call__(
        self, logits: Array, *, marginals: Array | None = None, u: Array | float = 0.0, groups: Array | None = None
    ) -> Array:
        """Return the classes of each row's set, bool [B, n].

        Args:
            logits: scores of the model [B, n].
            marginals: an exported file's marginals, for log-odds of numpy arrays.
            u: 0, or one uniform number a row [B, 1] if the calibration had such.
            groups: the number of each row's group [B], where thresholds are by group; -1, or None for all rows: not
                told, and the largest threshold serves.
        """
        values = inputs_of(self.score, logits, temperature=self.temperature, marginals=marginals)
        return self.of_inputs(values, u, groups)

    def of_inputs(self, values: Array, u: Array | float = 0.0, groups: Array | None = None) -> Array:
        """Return the sets from the inputs of the score, probabilities or log-odds [B, n].

        A row with NaN gets all classes, the only set with a guarantee where nothing is known.
        """
        xp = array_namespace(values)
        scores = self.score(values, u)
        limits = self.thresholds
        own = _of_rows(limits, groups, scores.shape[0])
        inside = scores <= xp.asarray(own, dtype=scores.dtype, device=device(scores))
        by_rank = self.score.ranked or limits.max_rank is not None
        if limits.max_rank is not None:
            inside &= ranks(values) <= xp.asarray(limits.max_rank, device=device(scores))
            if limits.groups:  # too few samples: all classes
                inside |= xp.asarray(np.isposinf(own), device=device(scores))
        if not self.allow_empty:
            inside |= best_classes(scores, values if by_rank else None)
        return inside | xp.any(xp.isnan(values), axis=-1, keepdims=True)


def _of_rows(limits: Thresholds, groups: Array | None, count: int) -> np.ndarray:
    """The thresholds that scores [B, n] are compared with."""
    if not limits.groups:
        if groups is not None:
            raise ValueError("these sets have no thresholds by group, got groups")
        return np.asarray(limits.scores)
    numbers = np.full(count, -1) if groups is None else as_numpy(groups)
    if numbers.shape != (count,) or (numbers < -1).any() or (numbers >= len(limits.groups)).any():
        raise ValueError(
            f"expected the number of a group, 0 to {len(limits.groups) - 1} or -1, for each of {count} rows"
        )
    return limits.of_groups[numbers][:, None]


def best_classes(scores: Array, values: Array | None = None) -> Array:
    """The classes that sets have which may not be empty, bool [B, n].

    Args:
        scores: of all classes [B, n]: those of the smallest score are best.
        values: the first of their ranking is best instead [B, n]; None: by the scores.
    """
    xp = array_namespace(scores)
    if values is None:
        return scores == xp.min(scores, axis=-1, keepdims=True)
    places = xp.arange(scores.shape[-1], device=device(scores))
    return places == xp.argmax(values, axis=-1, keepdims=True)


def counted(scores: Array, best: Array) -> Array:
    """The scores that a threshold meets [B, n]: minus infinity for classes that are in the set in any case.

    Args:
        scores: [B, n].
        best: see :func:`best_classes`.
    """
    xp = array_namespace(scores)
    return xp.where(best & ~xp.isnan(scores), -math.inf, scores)  # NaN stays, for thresholds refuse it


@dataclass(frozen=True)
class ScoredRows:
    """Calibration samples as arrays (:class:`topk_studies.old_trainer.oldsets.rules.CalibrationRows`).

    Args:
        score: of a class.
        values: the inputs of the score [N, n].
        labels: theirs [N].
        allow_empty: see :class:`PredictionSets`.
        by_rank: the best class is the first of the ranking, also where the score does not follow it.
        u: see :meth:`PredictionSets.__call__`.
    """

    score: Score
    values: Array
    labels: np.ndarray
    allow_empty: bool = False
    by_rank: bool = False
    u: Array | float = 0.0

    @property
    def n(self) -> int:
        return self.values.shape[-1]

    def label_scores(self) -> np.ndarray:
        return self._of_labels(self.all_scores())

    def label_ranks(self) -> np.ndarray:
        return self._of_labels(as_numpy(ranks(self.values)))

    def all_scores(self) -> np.ndarray:
        scores = self.score(self.values, self.u)
        if not self.allow_empty:
            by_rank = self.by_rank or self.score.ranked
            scores = counted(scores, best_classes(scores, self.values if by_rank else None))
        broken = np.isnan(as_numpy(self.values)).any(-1, keepdims=True)  # which a score that compares does not show
        return np.where(broken, np.nan, as_numpy(scores))

    def _of_labels(self, of_classes: np.ndarray) -> np.ndarray:
        return of_classes[np.arange(len(self.labels)), self.labels]


def calibrate(
    logits: Array,
    labels: Array,
    *,
    alpha: float = 0.1,
    score: str | Score = "lac",
    rule: str = "marginal",
    temperature: float = 1.0,
    marginals: Array | None = None,
    allow_empty: bool = False,
    u: Array | float = 0.0,
    rule_options: dict[str, Any] | None = None,
    **options: Any,
) -> PredictionSets:
    """Prediction sets that hold the label with probability at least 1 - alpha.

    Args:
        logits: held-out scores [N, n], from data that the model was not trained on.
        labels: theirs [N].
        alpha: the share of labels that may be missed.
        score: a name of :data:`SCORES`, or a score.
        rule: a name of :data:`RULES`; ``"average_size"`` takes ``rule_options={"size": K}`` in place of alpha.
        temperature: divides the logits.
        marginals, u: see :meth:`PredictionSets.__call__`.
        allow_empty: see :class:`PredictionSets`. Where sets may not be empty, coverage is above
            1 - alpha + 1 / (N + 1) only where the best class alone covers more, or scores are equal.
        rule_options: of the rule, a function of :mod:`topk_studies.old_trainer.oldsets.thresholds`.
        options: of the score.
    """
    score = create_score(score, **options)
    labels = check_labels(labels, logits.shape[-1])
    if len(labels) != logits.shape[0]:
        raise ValueError(f"expected a label for each of {logits.shape[0]} rows, got {len(labels)}")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be above 0 and finite, got {temperature!r}")
    values = inputs_of(score, logits, temperature=temperature, marginals=marginals)
    check_rule(rule, rule_options or {})
    rows = ScoredRows(score, values, labels, allow_empty, RULES[rule].limits_ranks, u)
    return PredictionSets(score, find_thresholds(rows, alpha, rule, **(rule_options or {})), temperature, allow_empty)
