"""One row of the softmax family, see README.md: a few passes over scores that stay in the cache."""
# pyright: reportCallIssue=false, reportArgumentType=false
# numba's intrinsics are called without their first parameter

from functools import lru_cache

import numpy as np
import torch
from numba import carray

from topk_registry.ops import openmp
from topk_registry.ops.rows.numba.compiled import BLOCK, c_function, compiled, log
from topk_registry.ops.rows.numba.curves import NUMBERS, call_curve
from topk_registry.ops.rows.numba.driver import ROOMS, ROW
from topk_registry.ops.rows.numba.vectors import (
    exponentials,
    largest_of,
    log_not_of,
    place_of_largest,
    probabilities_of,
    scale_by,
    total_of,
)

SCALE, OTHERS, PARAMETERS = range(3)  # the kernel's numbers; the curve's follow
OWN, OWN_64, CURVE_AT, CURVE_64 = range(4)  # addresses, in the precision of the kernel and in double


@lru_cache
def row_kernel(dtype: torch.dtype) -> int:
    """The address of the row kernel that computes in this precision."""
    edition, real = openmp.edition(), np.float64 if dtype == torch.float64 else np.float32

    def body(n, s, m, y, mass, b, numbers, tensors, room, g):
        assert edition  # part of the cache's key: numba does not see that other files have changed
        s, m, g, room = carray(s, n, real), carray(m, n, real), carray(g, n, real), carray(room, ROOMS * n, real)
        number, at = carray(numbers, PARAMETERS + NUMBERS + 1, np.float64), carray(tensors, 4, np.int64)
        scale, parameters = real(number[SCALE]), number[PARAMETERS:].ctypes.data
        if y >= 0:
            if number[OTHERS] == 0:
                return at_label(s, y, mass, scale, at[CURVE_64], parameters, at[OWN_64], g)
            m[:] = 0
            m[y] = mass
        return at_masses(s, m, mass, scale, at[CURVE_AT], parameters, at[OWN], g, room)

    return c_function(ROW, body)


@compiled
def at_label(s, y, mass, scale, curve, parameters, own, g):
    """Equations 1 and 2: with the label's log-odds, which are taken against the others alone."""
    real = s.dtype.type
    a = max(largest_of(s[:y]), largest_of(s[y + 1 :]))
    a = a if a > -np.inf or a != a else real(0)
    rest = exponentials(s[:y], a, scale, g[:y]) + exponentials(s[y + 1 :], a, scale, g[y + 1 :])
    log_odds = (np.float64(s[y]) - np.float64(a)) * scale - (log(rest) if rest > 0 or rest != rest else -np.inf)
    value, slope = on_curve(log_odds, mass, mass, y, curve, parameters, own)
    share = real(slope * scale / rest) if rest != 0 else real(0)
    g[y] = 0
    scale_by(g, -share)
    g[y] = slope * scale
    return value


@compiled
def at_masses(s, m, mass, scale, curve, parameters, own, g, room):
    """Equations 3 to 5: every class on the curve; the top class, which alone can have p above 1/2, by itself."""
    real, n = s.dtype.type, len(s)
    top = place_of_largest(s)
    most = s[top]
    a = max(largest_of(s[:top]), largest_of(s[top + 1 :]))
    a = a if a > -np.inf or a != a else real(0)
    rest = exponentials(s[:top], a, scale, g[:top]) + exponentials(s[top + 1 :], a, scale, g[top + 1 :])
    g[top] = 0
    gap = (np.float64(most) - np.float64(a)) * scale
    t = np.exp(-gap) if rest > 0 or rest != rest else 0.0
    z = 1 + t * rest
    log_z, share = real(np.log1p(t * rest)), real(t / z)
    h, size, value, total = room[:n], min(BLOCK, n), 0.0, 0.0
    log_p, log_not, p, not_p = room[n : n + size], room[n + size :], room[n + 2 * size :], room[n + 3 * size :]
    for start in range(0, n, BLOCK):
        row, e, slope = s[start : start + BLOCK], g[start : start + BLOCK], h[start : start + BLOCK]
        for i in range(len(row)):
            log_p[i] = (row[i] - most) * scale - log_z
            p[i] = e[i] * share
            not_p[i] = real(1) - p[i]
            log_not[i] = log_not_of(p[i])
        if start <= top < start + BLOCK:
            i = top - start
            log_p[i], p[i], not_p[i] = -log_z, real(1 / z), real(t * rest / z)
            log_not[i] = real((np.log(rest) if rest > 0 else -np.inf) - gap - np.log(z))
        at = (log_p.ctypes.data, log_not.ctypes.data, p.ctypes.data, not_p.ctypes.data, m[start:].ctypes.data)
        value += call_curve(curve, (len(row), *at, mass, start, parameters, own, slope.ctypes.data))
        at_top = slope[top - start] if start <= top < start + BLOCK else real(0)
        total += np.float64(at_top)
        for i in range(len(row)):
            slope[i] /= not_p[i]
    h[top] = 0
    rest_slope, own_slope = total_of(h), total
    shared = real(rest_slope * t / z + (own_slope / rest if rest != 0 else 0.0))
    for i in range(n):
        g[i] = (h[i] - g[i] * shared) * scale
    g[top] = real((own_slope - rest_slope / z) * scale)
    return value


@compiled
def on_curve(log_odds, m, mass, c, curve, parameters, own):
    """The loss of a single class of these log-odds, and its slope."""
    x = np.empty(6)
    x[0], x[1], x[2], x[3] = probabilities_of(log_odds)
    x[4] = m
    at = (x.ctypes.data, x[1:].ctypes.data, x[2:].ctypes.data, x[3:].ctypes.data, x[4:].ctypes.data)
    return call_curve(curve, (1, *at, mass, c, parameters, own, x[5:].ctypes.data)), x[5]
