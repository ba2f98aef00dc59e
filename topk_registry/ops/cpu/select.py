"""Select the largest scores of a row of scores."""
# pyright: reportCallIssue=false
# numba's intrinsics are called without their first parameter

import numpy as np

from topk_registry.ops.cpu.masks import at_least, lowest_bit
from topk_registry.ops.cpu.numbers import borrowing


@borrowing
def largest(row, top, where):
    """Write the T = len(top) largest scores of a row to ``top`` in descending order, and their classes to ``where``.

    Of equal scores, the score of the lower class comes first. The length of the row must be a multiple of 64.
    """
    T = len(top)
    for j in range(T):
        _insert(row[j], j, j, top, where)
    for start in range(0, len(row), 64):
        bits = at_least(row, start, top[T - 1])
        while bits != 0:
            j = start + lowest_bit(bits)
            if j >= T and row[j] > top[T - 1]:
                _insert(row[j], j, T, top, where)
            bits &= bits - np.uint64(1)


@borrowing
def _insert(score, i, place, top, where):
    # insert the score of class i into the first ``place`` numbers of ``top``
    while place > 0 and score > top[place - 1]:
        place -= 1
        if place + 1 < len(top):
            top[place + 1], where[place + 1] = top[place], where[place]
    top[place], where[place] = score, i
