"""One row of the hinge on the perturbed k-th largest score, see ../README.md: from scores to loss and gradient."""
# pyright: reportCallIssue=false, reportArgumentType=false
# numba's intrinsics are called without their first parameter

import numpy as np

from topk_registry.ops.cpu.memory import array
from topk_registry.ops.cpu.vectors import nothing
from topk_registry.ops.perturbed.numba import kth
from topk_registry.ops.perturbed.numba.table import SHAPE
from topk_registry.ops.rows.numba.hinges import hinge, hinges
from topk_registry.ops.rows.numba.row import ROOMS, kernel_of_row, of_label

K, DRAWS, EPSILON, ALPHA, SCALE = range(5)  # the kernel's numbers
OWN, TABLE, SEED = range(3)  # the kernel's tensors


@kernel_of_row(numbers=5, operands=3)
def row(s, m, y, mass, b, number, at, room, g):
    n, key = len(s), array(at[SEED], 2, np.uint32)
    table, own = array(at[TABLE], SHAPE, np.float64), array(at[OWN], n if at[OWN] != 0 else 0, s.dtype)
    k, draws, epsilon = np.int64(number[K]), np.int64(number[DRAWS]), number[EPSILON]
    alpha, scale = number[ALPHA], number[SCALE]
    rank = min(k, n + 1 - k)  # counted from the nearer end
    space = kth.room(n, rank, draws)
    index = kth.places(space, draws)
    guess = np.float64(room[ROOMS * n])
    if rank < k:
        negative = room[:n]
        for i in range(n):
            negative[i] = -s[i]
        threshold, guess = kth.of_row(negative, b, rank, epsilon, key, table, index, guess, space)
        threshold = -threshold
    else:
        threshold, guess = kth.of_row(s, b, k, epsilon, key, table, index, guess, space)
    room[ROOMS * n] = guess
    if threshold != threshold:
        return nothing(g)
    if m is None or y >= 0:
        g[:] = 0
        value, slope = hinge(s, y, mass, threshold, own, alpha, 1.0, scale, g)
    else:
        value, slope = hinges(s, m, threshold, own, alpha, 1.0, scale, g)
    share = s.dtype.type(slope / draws)
    for i in index:
        g[i] += share
    return value


row_of_label = of_label(row)
