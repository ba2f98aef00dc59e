"""The perturbed top-k without chance: its value and gradient as one-dimensional integrals, for a few scores."""

import math
from itertools import pairwise

import numpy as np


def expected_kth(scores: list[float], k: int, epsilon: float) -> tuple[float, np.ndarray]:
    """E[(s + eps Z)_[k]] and E[one-hot of the k-th], float64.

    Class i is the k-th at height x if it lies at x and exactly k - 1 of the others above: the density of that, summed
    over a grid wide and fine enough for the trapezoid rule to be exact to rounding.
    """
    s = np.array(scores)
    x = np.linspace(s.min() - 10 * epsilon, s.max() + 10 * epsilon, 20_001)
    z = (x - s[:, None]) / epsilon  # [n, points]
    density = np.exp(-(z**2) / 2) / (epsilon * math.sqrt(2 * math.pi))
    above = np.vectorize(math.erfc)(z / math.sqrt(2)) / 2
    is_kth = np.stack([density[i] * _count(np.delete(above, i, 0))[k - 1] for i in range(len(s))])
    step = x[1] - x[0]
    return float((is_kth.sum(0) * x).sum() * step), is_kth.sum(1) * step


def _count(p: np.ndarray) -> list[np.ndarray]:
    """How many independent events of probabilities p [m, points] happen: the chance of 0, 1, ..., m."""
    chance = [np.ones(p.shape[1])] + [np.zeros(p.shape[1]) for _ in p]
    for p_i in p:
        chance = [chance[0] * (1 - p_i)] + [now * (1 - p_i) + fewer * p_i for fewer, now in pairwise(chance)]
    return chance
