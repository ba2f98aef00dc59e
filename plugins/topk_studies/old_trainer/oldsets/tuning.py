"""Options of scores chosen on data that serves no other purpose."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from topk_studies.old_trainer.oldsets.scores import Array, Raps, Saps, Score, as_numpy, probabilities, ranks, score_kind
from topk_studies.old_trainer.oldsets.sets import ScoredRows
from topk_studies.old_trainer.oldsets.thresholds import check_alpha, marginal, order_of

PENALTIES = (0.001, 0.01, 0.1, 0.2, 0.5)  # Angelopoulos et al. 2021
WEIGHTS = tuple(round(0.02 * 1.5**i, 4) for i in range(9))  # 0.02 to 0.5: Huang et al. 2024 search this range


def is_tuned(name: str, options: dict[str, Any]) -> bool:
    """True where calibration chooses options of this score on samples of their own: none of them is given."""
    return score_kind(name) in CHOICES and not options


def tune(score: Score, values: Array, labels: Array, alpha: float, *, allow_empty: bool = False) -> Score:
    """The options of a score with the smallest mean set, on samples apart from the calibration's.

    RAPS: ``k_reg`` is the rank that covers 1 - alpha of the labels, the penalty one of five. SAPS: the weight, one of
    nine. Other scores have nothing to choose, and come back as they are.

    Args:
        score: whose options to choose.
        values: probabilities [N, n].
        labels: theirs [N].
        alpha: the share of labels that may be missed.
        allow_empty: see :class:`topk_studies.old_trainer.oldsets.PredictionSets`.
    """
    check_alpha(alpha)
    given = as_numpy(labels)
    if type(score) not in CHOICES:
        return score
    choices = CHOICES[type(score)](score, values, given, alpha)
    return min(choices, key=lambda choice: mean_size(ScoredRows(choice, values, given, allow_empty), alpha))


def mean_size(rows: ScoredRows, alpha: float) -> float:
    """The mean number of classes of these rows' sets, at their own threshold."""
    scores = rows.all_scores()
    threshold = marginal(scores[np.arange(len(rows.labels)), rows.labels], alpha)
    return float((scores <= threshold).sum(-1).mean())


def _of_raps(score: Raps, values: Array, labels: np.ndarray, alpha: float) -> list[Score]:
    places = np.sort(as_numpy(ranks(values))[np.arange(len(labels)), labels])
    k_reg = int(places[min(order_of(len(places), alpha), len(places)) - 1])
    return [replace(score, penalty=penalty, k_reg=k_reg) for penalty in PENALTIES]


def _of_saps(score: Saps, values: Array, labels: np.ndarray, alpha: float) -> list[Score]:
    return [replace(score, weight=weight) for weight in WEIGHTS]


# the scores with options to choose, and how; a subclass of one of them is another score
CHOICES: dict[type[Score], Callable[..., list[Score]]] = {Raps: _of_raps, Saps: _of_saps}


def fit_softmax_temperature(logits: Array, labels: Array, *, tolerance: float = 1e-3) -> float:
    """The temperature at which the labels are most likely under softmax(logits / T).

    It makes probabilities honest, and leaves ``topk`` sets as they are. It does not make sets small: the best one for
    APS is often another (Xi et al. 2024, Dabah and Tirer 2025), so look at the sizes before and after.

    Args:
        logits: held-out scores [N, n].
        labels: theirs [N].
        tolerance: relative.
    """
    scores, given = as_numpy(logits).astype(np.float64), as_numpy(labels)
    spread = float(scores.std(-1).mean())
    if not 0.0 < spread < math.inf:
        raise ValueError(f"logits must be finite and differ within rows, got a mean deviation of {spread}")

    def nll(log_t: float) -> float:
        p = probabilities(scores, math.exp(log_t))[np.arange(len(given)), given]
        return float(-np.log(p.clip(min=1e-300)).mean())

    grid = math.log(spread) + math.log(10) / 2 * np.arange(-6, 7)
    best = min(range(len(grid)), key=lambda i: nll(grid[i]))
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    while high - low > tolerance:  # the likelihood has one maximum in 1 / T: thirds suffice
        a, b = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, b) if nll(a) < nll(b) else (a, high)
    return math.exp((low + high) / 2)
