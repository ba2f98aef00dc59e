"""One row of the hinge on the perturbed k-th largest score, see ../README.md: from scores to loss and gradient."""
# pyright: reportCallIssue=false, reportArgumentType=false
# numba's intrinsics are called without their first parameter

from functools import lru_cache

import numpy as np
import torch
from numba import carray

from topk_registry.ops.cpu import openmp
from topk_registry.ops.cpu.functions import c_function
from topk_registry.ops.cpu.vectors import nothing
from topk_registry.ops.perturbed.numba import kth, noise
from topk_registry.ops.rows.numba.driver import ROOMS, ROW
from topk_registry.ops.rows.numba.hinges import hinge, hinges

K, DRAWS, EPSILON, ALPHA, SCALE, SEED = range(6)  # the kernel's numbers; the seed is an integer in the place of one
OWN, TABLE = range(2)  # the kernel's tensors


@lru_cache
def row_kernel(dtype: torch.dtype) -> int:
    """The address of the row kernel that computes in this precision."""
    edition, real = openmp.edition(), np.float64 if dtype == torch.float64 else np.float32
    shape = tuple(noise.table().shape)

    def body(n, s, m, y, mass, b, numbers, operands, room, g):
        assert edition  # part of the cache's key: numba does not see that other files have changed
        s, m, g, number = carray(s, n, real), carray(m, n, real), carray(g, n, real), carray(numbers, 6, np.float64)
        key, at = carray(numbers, 12, np.uint32)[2 * SEED :], carray(operands, 2, np.int64)
        table = carray(openmp.pointer(at[TABLE]), shape, np.float64)
        own = carray(openmp.pointer(at[OWN]), n if at[OWN] != 0 else 0, real)
        k, draws, epsilon = np.int64(number[K]), np.int64(number[DRAWS]), number[EPSILON]
        alpha, scale = number[ALPHA], number[SCALE]
        rank = min(k, n + 1 - k)  # counted from the nearer end
        index, space, room = np.empty(draws, np.int64), kth.room(n, rank, draws), carray(room, ROOMS * n + 1, real)
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
        if y >= 0:
            g[:] = 0
            value, slope = hinge(s, y, mass, threshold, own, alpha, 1.0, scale, g)
        else:
            value, slope = hinges(s, m, threshold, own, alpha, 1.0, scale, g)
        share = real(slope / draws)
        for i in index:
            g[i] += share
        return value

    return c_function(ROW, body)
