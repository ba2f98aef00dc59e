"""Rows of a made-up model whose labels are known to follow its probabilities, more or less."""

from typing import Any

import numpy as np

from topk_registry.conformal import SCORES, Score, create_score, inputs_of
from topk_registry.conformal.scores import LogOdds


def model_rows(count: int, n: int = 10, *, seed: int = 0, sharpness: float = 2.0) -> tuple[np.ndarray, np.ndarray]:
    """Logits [count, n] and labels [count], drawn from a softmax that is a little less sharp than the model's."""
    rng = np.random.default_rng(seed)
    logits = sharpness * rng.standard_normal((count, n)) * rng.uniform(0.3, 1.5, (count, 1))
    labels = (0.7 * logits + rng.gumbel(size=logits.shape)).argmax(-1)
    return logits, labels


def labelled_rows(count: int, n: int = 8, *, seed: int = 0, unlabelled: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities [count, n], continuous, and targets that follow them, some rows without labels."""
    rng = np.random.default_rng(seed)
    logits = 1.5 * rng.standard_normal((count, n)) - 0.7 + rng.standard_normal((count, 1))
    p = 1 / (1 + np.exp(-logits))
    targets = rng.random((count, n)) < 1 / (1 + np.exp(-1.3 * logits))
    targets[rng.random(count) < unlabelled] = False
    return p, targets


HARD = {
    "ties": np.array([[1.0, 3.0, 3.0, 1.0, 0.0], [2.0, 2.0, 0.0, 2.0, 2.0]]),
    "flat": np.zeros((2, 5)),
    "one dominant class": np.array([[0.0, 90.0, 0.0, 1.0, -5.0], [60.0, -60.0, 0.0, 0.0, 0.0]]),
    "far tail": np.array([[0.0, -120.0, -130.0, -140.0, -150.0]]),
    "two classes": np.array([[0.3, 0.1]]),
}

# options of scores, where the defaults would not do for a few classes
OPTIONS: dict[str, dict[str, Any]] = {
    "raps": {"penalty": 0.05, "k_reg": 1},
    "saps": {"weight": 0.15},
}


def families(n: int) -> tuple[int, ...]:
    """The parents of a tree of n classes: families of three, in orders of two, below a root."""
    low, order = -(-n // 3), -(-n // 6)
    root = n + low + order
    of_classes = [n + y // 3 for y in range(n)]
    return (*of_classes, *(n + low + i // 2 for i in range(low)), *[root] * order, -1)


def score_of(name: str, n: int, k: int = 3) -> Score:
    """A registered score of n classes; options that are learned from labels are shares that rise with the class."""
    if name == "tree":
        return create_score(name, parents=families(n), nodes=2)
    shares = tuple(2 * np.arange(1, n + 1) / (n * (n + 1)))
    options = {**OPTIONS.get(name, {}), **dict.fromkeys(SCORES[name].learned, shares)}
    return create_score(name, **({"k": k} if name == "log_odds" else options))


def marginals_for(score: Score, logits: np.ndarray) -> np.ndarray | None:
    """The marginals that a score of numpy arrays needs, as an exported file gives them; None for other scores."""
    if not isinstance(score, LogOdds):
        return None
    import torch

    from topk_registry.functional import topk_marginals

    return topk_marginals(torch.from_numpy(logits), score.k).numpy()


def values_of(score: Score, logits: np.ndarray) -> np.ndarray:
    """The inputs of a score of numpy arrays."""
    return inputs_of(score, logits, marginals=marginals_for(score, logits))


def counted_by_hand(score: Score, values: np.ndarray, u: float | np.ndarray = 0.0) -> np.ndarray:
    """Scores row by row, minus infinity at the class that a set which may not be empty has in any case."""
    scores = score(values, u).copy()
    for row, own in zip(values, scores, strict=True):
        own[row.argmax() if score.ranked else own == own.min()] = -np.inf
    return scores
