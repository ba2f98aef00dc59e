"""Options of scores chosen on data that serves no other purpose."""

import math
from dataclasses import replace

import numpy as np

from topk_registry.conformal.scores import Array, Raps, Saps, Score, as_numpy, probabilities, ranks
from topk_registry.conformal.thresholds import marginal, order_of

PENALTIES = (0.001, 0.01, 0.1, 0.2, 0.5)  # Angelopoulos et al. 2021
WEIGHTS = tuple(round(0.02 * 1.5**i, 4) for i in range(9))  # 0.02 to 0.5: Huang et al. 2024 search this range


def tune(score: Score, values: Array, labels: Array, alpha: float) -> Score:
    """The options of a score with the smallest mean set, on samples apart from the calibration's.

    RAPS: ``k_reg`` is the rank that covers 1 - alpha of the labels, the penalty one of five. SAPS: the weight, one of
    nine. Other scores have nothing to choose, and come back as they are.

    Args:
        score: whose options to choose.
        values: probabilities [N, n].
        labels: theirs [N].
        alpha: the share of labels that may be missed.
    """
    given = as_numpy(labels)
    if isinstance(score, Raps):
        places = np.sort(as_numpy(ranks(values))[np.arange(len(given)), given])
        k_reg = int(places[min(order_of(len(places), alpha), len(places)) - 1])
        choices: list[Score] = [replace(score, penalty=penalty, k_reg=k_reg) for penalty in PENALTIES]
    elif isinstance(score, Saps):
        choices = [replace(score, weight=weight) for weight in WEIGHTS]
    else:
        return score
    return min(choices, key=lambda choice: mean_size(choice, values, given, alpha))


def mean_size(score: Score, values: Array, labels: np.ndarray, alpha: float) -> float:
    """The mean number of classes of the sets of rows [N, n], at the threshold of those rows."""
    scores = as_numpy(score(values))
    threshold = marginal(scores[np.arange(len(labels)), labels], alpha)
    return float((scores <= threshold).sum(-1).clip(min=1).mean())


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
