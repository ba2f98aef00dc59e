"""Weighted k-means for a few hundred points."""

import numpy as np

RESTARTS = 10
ROUNDS = 100


def weighted_kmeans(points: np.ndarray, weights: np.ndarray, clusters: int, rng: np.random.Generator) -> np.ndarray:
    """The cluster of each point [m]: the best of ten runs of Lloyd's algorithm from k-means++ starts.

    Args:
        points: [m, d].
        weights: of the points [m].
        clusters: at most m.
        rng: of the starts.
    """
    runs = [_lloyd(points, weights, _start(points, weights, clusters, rng)) for _ in range(RESTARTS)]
    return min(runs, key=lambda run: run[0])[1]


def _start(points: np.ndarray, weights: np.ndarray, clusters: int, rng: np.random.Generator) -> np.ndarray:
    chosen = [rng.choice(len(points), p=weights / weights.sum())]
    for _ in range(clusters - 1):
        cost = weights * _squares(points, points[chosen]).min(1)
        # where all points lie on centres already, any will do
        chosen.append(rng.choice(len(points), p=cost / cost.sum()) if cost.sum() else rng.choice(len(points)))
    return points[chosen]


def _lloyd(points: np.ndarray, weights: np.ndarray, centres: np.ndarray) -> tuple[float, np.ndarray]:
    nearest = _squares(points, centres).argmin(1)
    for _ in range(ROUNDS):
        for c in range(len(centres)):
            if (mine := nearest == c).any():
                centres[c] = np.average(points[mine], axis=0, weights=weights[mine])
        before, nearest = nearest, _squares(points, centres).argmin(1)
        if (before == nearest).all():
            break
    return float((weights * _squares(points, centres).min(1)).sum()), nearest


def _squares(points: np.ndarray, centres: np.ndarray) -> np.ndarray:
    return ((points[:, None] - centres) ** 2).sum(-1)  # [m, clusters]
