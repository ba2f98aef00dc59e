"""Relaxed rankings: the probabilities of ranks 1 to k for each class, from scores divided by the temperature.

Relaxed sorts exclude scores of -inf; networks need finite scores.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

NETWORKS = ("odd_even", "bitonic")
RELAXATIONS = ("neuralsort", "softsort", *NETWORKS)
# lower bound on the probability of a rank under a sorting network, as in the authors' code: products of soft swaps
# underflow, and their logarithm would be infinite
LEAST = 1e-7
OUT = -1e30  # the logit of a class that takes no part: finite, as the difference of two infinite ones is NaN


def log_probabilities(p: Tensor) -> Tensor:
    """Return the logarithms of a network's probabilities."""
    return (p * (1 - 2 * LEAST) + LEAST).log()


def rank_logits(x: Tensor, k: int, relaxation: str) -> Tensor:
    """Return the logits [B, k, n] whose softmax over the classes are the highest k ranks of a relaxed sort of x."""
    kept = x > -torch.inf
    low = torch.where(kept, x, torch.inf).amin(-1, keepdim=True)
    finite = torch.where(kept, x, torch.where(low < torch.inf, low, 0.0))
    logits = _neuralsort(finite, kept, k) if relaxation == "neuralsort" else _softsort(finite, k)
    return torch.where(kept[:, None], logits, OUT)


def _neuralsort(x: Tensor, kept: Tensor, k: int) -> Tensor:
    """Row r is (n + 1 - 2r) x_i - sum_j |x_i - x_j|, which is largest at rank r."""
    n = kept.sum(-1, keepdim=True)
    spread = _absolute_differences(x) - (x.shape[1] - n) * (x - x.amin(-1, keepdim=True))  # others stand at the lowest
    factors = n + 1 - 2 * torch.arange(1, k + 1, dtype=x.dtype, device=x.device)
    return factors[:, :, None] * x[:, None] - spread[:, None]


def _absolute_differences(x: Tensor) -> Tensor:
    """sum_j |x_i - x_j| [B, n], in O(n log n): by rank, each score is above those after it."""
    n = x.shape[1]
    ordered, where = x.sort(-1, descending=True)
    steps = ordered[:, :-1] - ordered[:, 1:]
    rank = torch.arange(1, n, dtype=x.dtype, device=x.device)
    zero = torch.zeros_like(x[:, :1])
    # from step to step, so that no large sums cancel: the distances to all above, and to all below
    to_above = torch.cat((zero, (rank * steps).cumsum(-1)), 1)
    to_below = torch.cat((((n - rank) * steps).flip(-1).cumsum(-1).flip(-1), zero), 1)
    return torch.zeros_like(x).scatter(1, where, to_above + to_below)


def _softsort(x: Tensor, k: int) -> Tensor:
    """Row r is -|x_i - x_[r]|."""
    highest = x.topk(k, dim=1).values
    return -(highest[:, :, None] - x[:, None]).abs()


def network(x: Tensor, P: Tensor, kind: str, swap: str) -> Tensor:
    """Return P [B, n, c] after a sorting network of soft swaps has mixed its rows.

    For the identity these are the probabilities of every place and class; for one of its columns, those of one class.
    Every comparator replaces two numbers by their soft maximum and minimum, and mixes the rows of P in the same way.
    """
    n = x.shape[1]
    if kind == "odd_even":  # soft swaps depend on where a score starts: the authors' network sorts the other way round
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
    """Comparators of odd-even transposition sort, layer by layer: where the larger and the smaller number go."""
    for layer in range(n):
        high = list(range(layer % 2, n - 1, 2))
        if high:
            yield high, [i + 1 for i in high]


def _bitonic(n: int) -> Iterator[tuple[list[int], list[int]]]:
    """Comparators of a bitonic network; n need not be a power of two: it is one padded with numbers that stay last."""
    size = 1 << (n - 1).bit_length()
    block = 2
    while block <= size:
        # the first layer of a block compares mirrored places, so that all comparators point the same way
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
