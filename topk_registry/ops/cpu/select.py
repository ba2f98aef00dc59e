"""Select the largest scores of a row of scores."""

import numpy as np

from topk_registry.ops.cpu.masks import places_from
from topk_registry.ops.cpu.memory import empty
from topk_registry.ops.cpu.numbers import borrowing, compiled


@borrowing
def stripe_length(n, T):
    """Return the stripe length that :func:`largest` uses to find the T largest of n scores, or 0 for no stripes."""
    length = 64
    while length < 4 * T:
        length *= 2
    return length if 2 * length <= n else 0


@compiled
def scratch(n, T):
    return empty(stripe_length(n, T), np.float32), empty(n, np.int64), empty(n, np.float32)


@borrowing
def largest(row, top, where, space):
    """Write the T = len(top) largest scores of a row to ``top`` in descending order, and their classes to ``where``.

    Of equal scores, the score of the lower class comes first. ``space`` is memory from :func:`scratch`.

    A long row is divided into stripes of equal length. ``maxima[j]`` is the maximum of the j-th scores of all stripes.
    For example, the stripes (5, 1, 2) and (4, 7, 0) have the maxima (5, 7, 2). Let m be the T-th largest maximum. Then
    at least T scores of the row are at least m. Therefore, only the scores that are at least m are sorted.
    """
    maxima, classes, scores = space
    T = len(top)
    if len(maxima) > 0:
        maxima_of_stripes(row, maxima)
        in_order(maxima, top, where)
        if top[T - 1] > -np.inf:
            count = places_from(row, top[T - 1], classes)
            for j in range(count):
                scores[j] = row[classes[j]]
            in_order(scores[:count], top, where)
            for j in range(T):
                where[j] = classes[where[j]]
            return
    in_order(row, top, where)


@borrowing
def in_order(scores, top, where):
    """Write the len(top) largest of ``scores`` to ``top`` in descending order, and their indices to ``where``."""
    T = len(top)
    for j in range(len(scores)):
        v, place = scores[j], j if j < T else T
        if place == T and not v > top[T - 1]:
            continue
        while place > 0 and v > top[place - 1]:
            place -= 1
            if place + 1 < T:
                top[place + 1], where[place + 1] = top[place], where[place]
        if place < T:
            top[place], where[place] = v, j


@borrowing
def maxima_of_stripes(row, maxima):
    """Write to ``maxima[j]`` the maximum of ``row[j::len(maxima)]``, for a row at least as long as ``maxima``."""
    # "+ 0" changes only -0, and prevents masked stores of LLVM, which are slow on AMD processors
    n, length, zero = len(row), len(maxima), np.float32(0)
    for j in range(length):
        maxima[j] = row[j]
    for start in range(length, n, length):
        stripe = row[start : start + length]
        for j in range(len(stripe)):
            maxima[j] = (stripe[j] if stripe[j] > maxima[j] else maxima[j]) + zero
