"""The checks of a score of prediction sets, from the tests of the plug-in that brings it.

In one line,

    check_score(MyScore, options={"weight": 0.1})
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from topk_registry.oldsets import Score, calibrate, create_score
from topk_registry.testing.expect import expect
from topk_registry.testing.result import ChecksFailedError, result_of

CLASSES, ALPHA = 10, 0.1
CALIBRATION, MEASURED = 1000, 4000
# The coverage of one calibration has a standard deviation of sqrt(a (1 - a) (1 / 1000 + 1 / 4000)) = 0.011.
SLACK = 0.045


@dataclass(frozen=True)
class ScoreSubject:
    """A score, and rows of logits with labels that follow them."""

    score: Score
    logits: torch.Tensor  # [N, CLASSES], float64
    labels: torch.Tensor

    @classmethod
    def of(cls, score: Score) -> "ScoreSubject":
        rng = np.random.default_rng(20_180_221)
        count = CALIBRATION + MEASURED
        logits = 2.0 * rng.standard_normal((count, CLASSES)) * rng.uniform(0.3, 1.5, (count, 1))
        labels = (0.7 * logits + rng.gumbel(size=logits.shape)).argmax(-1)
        return cls(score, torch.from_numpy(logits), torch.from_numpy(labels))

    def values(self, rows: int = 40) -> torch.Tensor:
        """The inputs of the score for the first rows."""
        return self.score.inputs(self.logits[:rows], 1.0, None)


def has_a_name_and_plain_options(subject: ScoreSubject) -> None:
    """A calibrated file says in JSON by which score its sets were made."""
    expect(bool(getattr(subject.score, "name", "")), "expected a class attribute name")
    expect(json.loads(json.dumps(subject.score.options())) is not None, "expected options that JSON can hold")


def scores_every_class(subject: ScoreSubject) -> None:
    """A set holds the classes whose score is small, so each class needs one that is a number."""
    values = subject.values()
    for what, rows in (("generic rows", values), ("no rows", values[:0]), ("equal logits", _flat(subject))):
        scores = subject.score(rows)
        expect(scores.shape == rows.shape, f"expected scores {list(rows.shape)} of {what}, got {list(scores.shape)}")
        expect(not bool(scores.isnan().any()), f"expected numbers as the scores of {what}, got NaN")


def takes_arrays_as_tensors(subject: ScoreSubject) -> None:
    """The trainer gives tensors, an exported file arrays, and both must make the same sets."""
    values = subject.values()
    apart = np.abs(np.asarray(subject.score(values.numpy())) - subject.score(values).numpy()).max()
    expect(apart <= 1e-12, f"expected the same scores of arrays and of tensors, got a difference of {apart:.3g}")


def looks_at_one_row_at_a_time(subject: ScoreSubject) -> None:
    """Rows are exchangeable only where none changes the score of another."""
    values = subject.values()
    alone = torch.cat([subject.score(row) for row in values.split(1)])
    apart = float((alone - subject.score(values)).abs().max())
    expect(apart <= 1e-12, f"expected the scores of a row alone to be those among others, got {apart:.3g} apart")


def gives_labels_their_own_score(subject: ScoreSubject) -> None:
    """A threshold is an order statistic of the scores of the labels."""
    values, labels = subject.values(), subject.labels[:40]
    wanted = subject.score(values).gather(1, labels[:, None])[:, 0]
    apart = float((subject.score.of_labels(values, labels) - wanted).abs().max())
    expect(apart <= 1e-12, f"expected of_labels to pick from the scores of all classes, got {apart:.3g} apart")


def stays_below_its_bound(subject: ScoreSubject) -> None:
    """Where a class has no threshold of its own, the largest possible score stands for one."""
    bound, highest = subject.score.largest(CLASSES), float(subject.score(subject.values()).max())
    expect(highest <= bound + 1e-9, f"expected no score above largest({CLASSES}) = {bound:g}, got {highest:g}")


def bounds_the_rank_that_it_says(subject: ScoreSubject) -> None:
    """A file looks only at as many classes as a set can have."""
    values = subject.values()
    ranks = values.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1) + 1
    scores = subject.score(values)
    if subject.score.ranked:
        ordered = scores.gather(1, ranks.argsort(dim=-1))
        expect(bool((ordered.diff(dim=-1) >= -1e-12).all()), "expected a ranked score to grow with the rank of a class")
    for threshold in scores.flatten().quantile(torch.linspace(0.05, 0.95, 7, dtype=scores.dtype)).tolist():
        bound = subject.score.largest_rank(threshold, CLASSES)
        rank = int(torch.where(scores <= threshold, ranks, 1).max())
        expect(rank <= bound, f"expected ranks to {bound} at threshold {threshold:.4g}, got a class of rank {rank}")


def covers_as_promised(subject: ScoreSubject) -> None:
    """Split conformal prediction holds for any score that orders the classes of a row by the row alone."""
    sets = calibrate(subject.logits[:CALIBRATION], subject.labels[:CALIBRATION], alpha=ALPHA, score=subject.score)
    inside = sets(subject.logits[CALIBRATION:])
    coverage = float(inside.gather(1, subject.labels[CALIBRATION:, None]).double().mean())
    expect(coverage >= 1 - ALPHA - SLACK, f"expected {1 - ALPHA:g} of the labels in the sets, got {coverage:.3f}")


CHECKS: tuple[Callable[[ScoreSubject], None], ...] = (
    has_a_name_and_plain_options,
    scores_every_class,
    takes_arrays_as_tensors,
    looks_at_one_row_at_a_time,
    gives_labels_their_own_score,
    stays_below_its_bound,
    bounds_the_rank_that_it_says,
    covers_as_promised,
)


def check_score(score: str | type[Score] | Score, *, options: Mapping[str, Any] | None = None) -> None:
    """Run every check on a score of prediction sets and raise one :class:`ChecksFailedError` that lists all failures.

    Args:
        score: a subclass of :class:`topk_registry.oldsets.Score`, an object of one, or a registered name.
        options: keyword options to build it with.

    Example:
        >>> check_score("raps", options={"penalty": 0.05, "k_reg": 1})
    """
    built = score(**(options or {})) if isinstance(score, type) else create_score(score, **(options or {}))
    subject = ScoreSubject.of(built)
    results = [result_of(check, subject) for check in CHECKS]
    if any(result.status == "failed" for result in results):
        raise ChecksFailedError(type(built).__name__, results)


def _flat(subject: ScoreSubject) -> torch.Tensor:
    return subject.score.inputs(torch.zeros(2, CLASSES, dtype=torch.float64), 1.0, None)
