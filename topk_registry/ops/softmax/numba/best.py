"""One row of the softmax family where a curve is told which classes are the best, see README.md."""
# pyright: reportCallIssue=false, reportArgumentType=false
# numba's intrinsics are called without their first parameter

import numpy as np

from topk_registry.ops.cpu import select
from topk_registry.ops.cpu.memory import address_of, array, empty, zeros
from topk_registry.ops.cpu.numbers import NO_CLASS, compiled
from topk_registry.ops.rows.numba.curves import NUMBERS
from topk_registry.ops.rows.numba.row import kernel_of_row, of_label
from topk_registry.ops.softmax.numba.kernel import OTHERS, PARAMETERS, of_scores, shifted

BEST = PARAMETERS + NUMBERS + 1  # the number after those of kernel.py


@kernel_of_row(numbers=BEST + 1, operands=5)
def row(s, m, y, mass, b, number, at, room, g):
    n, best = len(s), np.int64(number[BEST])
    own, own_64 = room[n : 2 * n], array(address_of(room[2 * n :]), n, np.float64)
    s = shifted(s, at, room)
    if m is None or (y >= 0 and number[OTHERS] == 0):
        own_64[y] = select.number_from(s, s[y]) <= best
    else:
        mark_best(s, best, own, own_64)
    return of_scores(s, m, y, mass, number, at, (address_of(own), address_of(own_64)), room, g)


row_of_label = of_label(row)


@compiled
def mark_best(s, best, own, own_64):
    """1 for the scores above the largest after ``best``, and 0 for others, in both precisions."""
    top, where = empty(best + 1, s.dtype), zeros(best + 1, np.int64)
    select.largest(s, NO_CLASS, top, where, select.room(len(s), best + 1, s.dtype))
    rival = top[best]
    for i in range(len(s)):
        own[i] = s[i] > rival
        own_64[i] = s[i] > rival
