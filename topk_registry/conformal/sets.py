"""Prediction sets from logits: calibrate once, then call."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device

from topk_registry.conformal import thresholds as rules
from topk_registry.conformal.scores import Array, Score, as_numpy, create_score, inputs_of, ranks
from topk_registry.conformal.thresholds import Thresholds, check_alpha, check_labels, fewest

RULES = ("marginal", "per_class", "interpolated", "clustered", "rc3p", "average_size")


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

    def __call__(self, logits: Array, *, marginals: Array | None = None, u: Array | float = 0.0) -> Array:
        """Return the classes of each row's set, bool [B, n].

        Args:
            logits: scores of the model [B, n].
            marginals: an exported file's marginals, for log-odds of numpy arrays.
            u: 0, or one uniform number a row [B, 1] if the calibration had such.
        """
        values = inputs_of(self.score, logits, temperature=self.temperature, marginals=marginals)
        return self.of_inputs(values, u)

    def of_inputs(self, values: Array, u: Array | float = 0.0) -> Array:
        """Return the sets from the inputs of the score, probabilities or log-odds [B, n]."""
        xp = array_namespace(values)
        scores = self.score(values, u)
        limit = xp.asarray(self.thresholds.scores, dtype=scores.dtype, device=device(scores))
        inside = scores <= limit
        by_rank = self.score.ranked or self.thresholds.max_rank is not None
        places = ranks(values) if by_rank else None
        if self.thresholds.max_rank is not None:
            inside &= places <= xp.asarray(self.thresholds.max_rank, device=device(scores))
        if not self.allow_empty:
            inside |= places == 1 if by_rank else scores == xp.min(scores, axis=-1, keepdims=True)
        return inside | (limit == math.inf)  # whatever the rank


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
        rule: ``"marginal"``, ``"per_class"``, ``"interpolated"``, ``"clustered"``, ``"rc3p"``, or ``"average_size"``
            (with ``rule_options={"size": K}``, in place of alpha).
        temperature: divides the logits.
        marginals, u: see :meth:`PredictionSets.__call__`.
        allow_empty: see :class:`PredictionSets`.
        rule_options: of the rule, a function of :mod:`topk_registry.conformal.thresholds`.
        options: of the score.
    """
    score = create_score(score, **options)
    labels = check_labels(labels, logits.shape[-1])
    if len(labels) != logits.shape[0]:
        raise ValueError(f"expected a label for each of {logits.shape[0]} rows, got {len(labels)}")
    values = inputs_of(score, logits, temperature=temperature, marginals=marginals)
    found = find_thresholds(score, values, labels, alpha, rule, u=u, **(rule_options or {}))
    return PredictionSets(score, found, temperature, allow_empty)


def find_thresholds(
    score: Score, values: Array, labels: np.ndarray, alpha: float, rule: str, *, u: Array | float = 0.0, **options: Any
) -> Thresholds:
    """Return the thresholds of a rule, from the inputs of the score [N, n]."""
    if rule not in RULES:
        raise ValueError(f"no rule is called {rule!r}; there are {', '.join(RULES)}")
    scores = score(values, u)
    if rule == "average_size":
        return Thresholds(rules.average_size(scores, **options))
    own = as_numpy(scores)[np.arange(len(labels)), labels]
    places = as_numpy(ranks(values))[np.arange(len(labels)), labels] if rule == "rc3p" else None
    return thresholds_of(score, own, labels, scores.shape[-1], alpha, rule, places, **options)


def thresholds_of(
    score: Score,
    own: np.ndarray,
    labels: np.ndarray,
    n: int,
    alpha: float,
    rule: str,
    places: np.ndarray | None = None,
    **options: Any,
) -> Thresholds:
    """The thresholds of a rule with a coverage, from the scores (and ranks) of the labels [N]."""
    check_size(len(own), alpha)
    if rule == "marginal":
        return Thresholds(rules.marginal(own, alpha, **options))
    if rule == "rc3p":
        return rules.rc3p(own, places, labels, n, alpha, **options)
    if rule == "interpolated":
        options.setdefault("largest", score.largest(n))
    rare = {"per_class": rules.per_class, "interpolated": rules.interpolated, "clustered": rules.clustered}
    return Thresholds(rare[rule](own, labels, n, alpha, **options))


def check_size(count: int, alpha: float) -> None:
    """Raise unless this many calibration samples give a finite threshold."""
    check_alpha(alpha)
    if count < fewest(alpha):
        raise ValueError(
            f"{count} calibration samples are too few for alpha = {alpha:g}: it takes {fewest(alpha)}, or alpha of at "
            f"least {math.ceil(1e4 / (count + 1)) / 1e4:g}"
        )
