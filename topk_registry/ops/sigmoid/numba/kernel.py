"""One row of the sigmoid family, see README.md: every class on the curve, its score being its log-odds."""
# pyright: reportCallIssue=false, reportArgumentType=false
# numba's intrinsics are called without their first parameter

from functools import lru_cache

import numpy as np
import torch
from numba import carray

from topk_registry.ops.cpu import openmp
from topk_registry.ops.cpu.functions import BLOCK, c_function, compiled, exp, log1p
from topk_registry.ops.rows.numba.curves import NUMBERS, call_curve
from topk_registry.ops.rows.numba.driver import ROOMS, ROW

LOGARITHMS, PARAMETERS = range(2)  # the kernel's numbers; the curve's follow
CURVE_AT, OWN = range(2)  # addresses


@lru_cache
def row_kernel(dtype: torch.dtype) -> int:
    """The address of the row kernel that computes in this precision."""
    edition, real = openmp.edition(), np.float64 if dtype == torch.float64 else np.float32

    def body(n, s, m, y, mass, b, numbers, operands, room, g):
        assert edition  # part of the cache's key: numba does not see that other files have changed
        s, m, g, room = carray(s, n, real), carray(m, n, real), carray(g, n, real), carray(room, ROOMS * n, real)
        number = carray(numbers, PARAMETERS + NUMBERS + 1, np.float64)
        at = carray(operands, 2, np.int64)
        if y >= 0:
            m[:] = 0
            m[y] = mass
        parameters = number[PARAMETERS:].ctypes.data
        return rows(s, m, mass, at[CURVE_AT], number[LOGARITHMS] != 0, parameters, at[OWN], g, room)

    return c_function(ROW, body)


@compiled
def rows(s, m, mass, curve, logarithms, parameters, own, g, room):
    n, one, value = len(s), s.dtype.type(1), 0.0
    size = min(BLOCK, n)
    log_p, log_not, p, not_p = room[:size], room[size : 2 * size], room[2 * size : 3 * size], room[3 * size :]
    log_p[:], log_not[:] = 0, 0
    for start in range(0, n, BLOCK):
        row = s[start : start + BLOCK]
        for i in range(len(row)):
            e = exp(-abs(row[i]))
            large = one / (one + e)
            small = e * large
            p[i] = large if row[i] > 0 else small
            not_p[i] = small if row[i] > 0 else large
            log_p[i] = e
        if logarithms:
            for i in range(len(row)):
                large = log1p(log_p[i])
                log_p[i] = min(row[i], one - one) - large
                log_not[i] = -max(row[i], one - one) - large
        at = (log_p.ctypes.data, log_not.ctypes.data, p.ctypes.data, not_p.ctypes.data, m[start:].ctypes.data)
        value += call_curve(curve, (len(row), *at, mass, start, parameters, own, g[start:].ctypes.data))
    return value
