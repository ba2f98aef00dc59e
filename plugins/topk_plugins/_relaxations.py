"""Relaxed rankings: the probabilities of ranks 1 to k for each class, from scores divided by the temperature.

NeuralSort and SoftSort ignore scores of -inf. Sorting networks need finite scores.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

NETWORKS = ("odd_even", "bitonic")
RELAXATIONS = ("neuralsort", "softsort", *NETWORKS)
# lower bound on rank probabilities of a sorting network, as in the authors' code: products of soft swaps may
# underflow, and the logarithm would be infinite
LEAST = 1e-7
OUT = -1e30  # logit of an excluded class; finite, because inf - inf is NaN


def log_probabilities(p: Tensor) -> Tensor:
    return (p * (1 - 2 * LEAST) + LEAST).log()


def rank_logits(x: Tensor, k: int, relaxation: str) -> Tensor:
    """Return logits [B, k, n] of a relaxed sort of x [B, n]; softmax over classes gives probabilities of ranks."""
    kept = x > -torch.inf
    low = torch.where(kept, x, torch.inf).amin(-1, keepdim=True)
    finite = torch.where(kept, x, torch.where(low < torch.inf, low, 0.0))
    logits = _neuralsort(finite, kept, k) if relaxation == "neuralsort" else _softsort(finite, k)
    return torch.where(kept[:, None], logits, OUT)


def _neuralsort(x: Tensor, kept: Tensor, k: int) -> Tensor:
    """Return the logits of NeuralSort [B, k, n]: (n + 1 - 2r) x_i - sum_j |x_i - x_j| for rank r and class i."""
    n = kept.sum(-1, keepdim=True)
    spread = _absolute_differences(x) - (x.shape[1] - n) * (x - x.amin(-1, keepdim=True))  # excluded: lowest
    factors = n + 1 - 2 * torch.arange(1, k + 1, dtype=x.dtype, device=x.device)
    return factors[:, :, None] * x[:, None] - spread[:, None]


def _absolute_differences(x: Tensor) -> Tensor:
    """Return sum_j |x_i - x_j| [B, n] in O(n log n), from sorted scores."""
    n = x.shape[1]
    ordered, where = x.sort(-1, descending=True)
    steps = ordered[:, :-1] - ordered[:, 1:]
    rank = torch.arange(1, n, dtype=x.dtype, device=x.device)
    zero = torch.zeros_like(x[:, :1])
    # sums of distances to higher and to lower scores, from gaps of neighbors, so that nothing large cancels
    to_above = torch.cat((zero, (rank * steps).cumsum(-1)), 1)
    to_below = torch.cat((((n - rank) * steps).flip(-1).cumsum(-1).flip(-1), zero), 1)
    return torch.zeros_like(x).scatter(1, where, to_above + to_below)


def _softsort(x: Tensor, k: int) -> Tensor:
    """Return the logits of SoftSort [B, k, n]: -|x_i - x_[r]| for rank r and class i."""
    highest = x.topk(k, dim=1).values
    return -(highest[:, :, None] - x[:, None]).abs()


def network(x: Tensor, P: Tensor, kind: str, swap: str) -> Tensor:
    """Return P [B, n, c] after a sorting network of soft swaps on x [B, n] has mixed the rows of P.

    Each comparator replaces two scores by their soft maximum and soft minimum, and mixes two rows of P with the same
    weights. If P is the identity, the result is the probability of each rank for each class. If P is one column of the
    identity, the result is the probabilities of one class.
    """
    n = x.shape[1]
    if kind == "odd_even":  # the authors' network sorts in ascending order, which affects soft swaps
        x, P = x.flip(1), P.flip(1)
    for high, low in _odd_even(n) if kind == "odd_even" else _bitonic(n):
        a, b = x[:, high], x[:, low]
        keep = 0.5 + (a - b).atan() / math.pi if swap == "cauchy" else (a - b).sigmoid()
        swapped = 1 - keep if swap == "cauchy" else (b - a).sigmoid()
        x = _replaced(x, high, low, keep * a + swapped * b, swapped * a + keep * b)
        keep, swapped = keep[:, :, None], swapped[:, :, None]
        first, second = P[:, high], P[:, low]
        P = _replaced(P, high, low, keep * first + swapped * second, swapped * first + keep * second)
    return P


def _replaced(rows: Tensor, high: list[int], low: list[int], larger: Tensor, smaller: Tensor) -> Tensor:
    places = torch.tensor(high + low, device=rows.device)
    return rows.index_copy(1, places, torch.cat((larger, smaller), 1))


def _odd_even(n: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the layers of odd-even transposition sort: places of the larger and of the smaller number of each pair."""
    for layer in range(n):
        high = list(range(layer % 2, n - 1, 2))
        if high:
            yield high, [i + 1 for i in high]


def _bitonic(n: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the layers of a bitonic sorting network, cut down from the next power of two to n places."""
    size = 1 << (n - 1).bit_length()
    block = 2
    while block <= size:
        # the first layer of a block compares mirrored places, so that every comparator moves the larger number up
        pairs = [(start + i, start + block - 1 - i) for start in range(0, size, block) for i in range(block // 2)]
        yield _within(pairs, n)
        half = block // 4
        while half >= 1:
            pairs = [(i, i + half) for i in range(size) if not i & half]
            yield _within(pairs, n)
            half //= 2
        block *= 2


def _within(pairs: list[tuple[int, int]], n: int) -> tuple[list[int], list[int]]:
    kept = [(high, low) for high, low in pairs if low < n]
    return [high for high, _ in kept], [low for _, low in kept]
