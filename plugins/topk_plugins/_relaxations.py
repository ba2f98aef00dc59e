"""Relaxed rankings: the chances of each class to have rank 1, 2, ... k, of scores that the temperature has divided."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

RELAXATIONS = ("neuralsort", "softsort", "odd_even", "bitonic")
# below this the chance of a rank under a sorting network is not told apart from none, as in the authors' code: products
# of soft swaps underflow, and their logarithm would be infinite
LEAST = 1e-7


def log_ranks(x: Tensor, k: int, relaxation: str, swap: str) -> Tensor:
    """log P[r, i] [B, k, n] for the highest k ranks r of scores x [B, n]."""
    if relaxation == "neuralsort":
        return _neuralsort(x, k)
    if relaxation == "softsort":
        return _softsort(x, k)
    chances = _network(x, k, relaxation, swap)
    return (chances * (1 - 2 * LEAST) + LEAST).log()


def _neuralsort(x: Tensor, k: int) -> Tensor:
    """Row r is the softmax of (n + 1 - 2r) x_i - sum_j |x_i - x_j|, which is largest at rank r."""
    n = x.shape[1]
    factors = n + 1 - 2 * torch.arange(1, k + 1, dtype=x.dtype, device=x.device)
    spread = _absolute_differences(x)
    return (factors[:, None] * x[:, None] - spread[:, None]).log_softmax(-1)


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
    """Row r is the softmax of -|x_i - x_[r]|."""
    highest = x.topk(k, dim=1).values
    return (-(highest[:, :, None] - x[:, None]).abs()).log_softmax(-1)


def _network(x: Tensor, k: int, kind: str, swap: str) -> Tensor:
    """P [B, k, n] of a sorting network of soft swaps.

    Every comparator makes of two numbers their soft maximum and minimum, and mixes the rows of P alike.
    """
    n = x.shape[1]
    P = torch.eye(n, dtype=x.dtype, device=x.device).expand(len(x), n, n)
    if kind == "odd_even":  # soft swaps depend on where a score starts: the authors' network sorts the other way round
        x, P = x.flip(1), P.flip(1)
    for high, low in _odd_even(n) if kind == "odd_even" else _bitonic(n):
        a, b = x[:, high], x[:, low]
        keep = 0.5 + (a - b).atan() / math.pi if swap == "cauchy" else (a - b).sigmoid()
        swapped = 0.5 + (b - a).atan() / math.pi if swap == "cauchy" else (b - a).sigmoid()
        x = _replaced(x, high, low, keep * a + swapped * b, swapped * a + keep * b)
        keep, swapped = keep[:, :, None], swapped[:, :, None]
        first, second = P[:, high], P[:, low]
        P = _replaced(P, high, low, keep * first + swapped * second, swapped * first + keep * second)
    return P[:, :k]


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
