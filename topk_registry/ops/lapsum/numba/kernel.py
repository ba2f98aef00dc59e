"""One row of LapSum's loss, see README.md: two passes over a row whose threshold is above all scores, else a selection
of the 2k largest scores and two passes more."""
# pyright: reportCallIssue=false, reportArgumentType=false
# numba's intrinsics are called without their first parameter

import math

import numpy as np

from topk_registry.ops.cpu import select
from topk_registry.ops.cpu.blocks import BLOCK, largest_of, total_of
from topk_registry.ops.cpu.memory import empty, zeros
from topk_registry.ops.cpu.numbers import NO_CLASS, compiled, summing
from topk_registry.ops.cpu.vectors import exponentials, nothing, scale_by
from topk_registry.ops.rows.numba.row import kernel_of_row, of_label

K, TAU = range(2)  # the kernel's numbers
LOG_2 = math.log(2)


@kernel_of_row(numbers=2)
def row(s, m, y, mass, b, number, at, room, g):
    return loss(s, m, y, mass, number[K], number[TAU], g)


row_of_label = of_label(row)


@compiled
def loss(s, m, y, mass, k, tau, g):
    """The loss; g is first d relative to its largest, e^(nearest - |x - b|), then the gradient."""
    real, a = s.dtype.type, largest_of(s)
    scale = 1 / tau
    if y >= 0:  # the sum without the label, for a gradient that does not cancel
        others = exponentials(s[:y], a, real(scale), g[:y]) + exponentials(s[y + 1 :], a, real(scale), g[y + 1 :])
        g[y] = math.exp((np.float64(s[y]) - np.float64(a)) * scale)
        total = others + np.float64(g[y])
    else:
        others, total = 0.0, exponentials(s, a, real(scale), g)
    if not total < np.inf:
        return nothing(g)
    b = math.log(total / (2 * k))  # of scores relative to a, where b is above all
    if b >= 0:
        if m is None or y >= 0:
            scale_by(g, real(mass * scale / total))
            g[y] = -mass * scale * (others / total)
            return mass * (LOG_2 + b - (np.float64(s[y]) - np.float64(a)) * scale)
        value = expected(s, m, a, real(scale), g, real(mass * scale / total))
        return value + mass * (LOG_2 + b)
    T = min(len(s), math.ceil(2 * k))
    top, where = empty(T, s.dtype), zeros(T, np.int64)
    if not select.largest(s, NO_CLASS, top, where, select.room(len(s), T, s.dtype)):
        return nothing(g)
    while T > 0 and top[T - 1] == -np.inf:
        T -= 1
    if k >= T:  # too few scores above -inf: their weights cannot add up to k
        return nothing(g)
    exponentials(s, top[T - 1], real(scale), g)
    for j in range(T):
        g[where[j]] = 0
    a = top[math.ceil(k) - 1]  # the lowest may be so far below that all others are one number from there
    tail, x, d = total_of(g), empty(T), empty(T)
    for j in range(T):
        x[j] = (np.float64(top[j]) - np.float64(a)) * scale
    b, nearest = threshold(x, tail, k)
    shrink = math.exp(nearest + x[T - 1] - b)
    for j in range(T):
        x[j] -= b
        d[j] = math.exp(nearest - abs(x[j]))
    if m is None or y >= 0:
        u = (np.float64(s[y]) - np.float64(a)) * scale - b
        return at_label(u, y, where[:T], d, tail * shrink, shrink, mass, scale, g)
    return at_masses(m, s, a, x, b, where[:T], d, tail * shrink, shrink, scale, g)


@compiled
def at_label(u, y, where, d, tail, shrink, mass, scale, g):
    """Equations 4 and 5; u is the label's x - b."""
    others, inside = tail, False
    for j in range(len(where)):
        inside |= where[j] == y
        others += d[j] if where[j] != y else 0.0
    others -= 0.0 if inside else np.float64(g[y]) * shrink
    total = tail
    for j in range(len(where)):
        total += d[j]
    share = mass * scale * slope(u) / total
    scale_by(g, g.dtype.type(share * shrink))
    for j in range(len(where)):
        g[where[j]] = share * d[j]
    g[y] = -share * others
    return -mass * log_chance(u)


@compiled
def at_masses(m, s, a, x, b, where, d, tail, shrink, scale, g):
    """As :func:`at_label`, of every class; those below b cost log 2 + b - x."""
    real, inside, total = s.dtype.type, empty(len(where)), tail
    for j in range(len(where)):
        inside[j], m[where[j]] = m[where[j]], 0
        total += d[j]
    slopes = total_of(m)
    value = slopes * (LOG_2 + b)
    for j in range(len(where)):
        if inside[j] != 0:
            slopes += inside[j] * slope(x[j])
            value -= inside[j] * log_chance(x[j])
    share = slopes * scale / total
    value += expected(s, m, a, real(scale), g, real(share * shrink))
    for j in range(len(where)):
        g[where[j]] = share * d[j] - scale * inside[j] * slope(x[j])
    return value


@compiled
def expected(s, m, a, scale, g, factor):
    """g <- factor g - scale m, and the sum of m (a - s) scale."""
    value = 0.0
    for start in range(0, len(s), BLOCK):
        stop = start + BLOCK
        value += np.float64(_expected(s[start:stop], m[start:stop], a, scale, g[start:stop], factor))
    return value


@summing
def _expected(s, m, a, scale, g, factor):
    total = s.dtype.type(0)
    for i in range(len(s)):
        total += m[i] * ((a - s[i]) * scale) if m[i] != 0 else s.dtype.type(0)
        g[i] = g[i] * factor - scale * m[i]
    return total


@compiled
def threshold(x, tail, k):
    """b and its distance to the nearest score, by equations 1 to 3: from the lowest score of the top group x upwards,
    until the weights at the next one add up to no more than k. ``tail`` is the sum of e^x over the scores below."""
    T = len(x)
    above = empty(T)  # sums of e^(x_j - x_i) / 2 over the scores x_i from the first to x_j
    above[0] = 0.5
    for j in range(1, T):
        above[j] = above[j - 1] * math.exp(x[j] - x[j - 1]) + 0.5
    if tail == 0 and T - above[T - 1] < k:  # b is below all scores
        step = math.log((T - k) / above[T - 1])
        return x[T - 1] + step, -step
    below = tail / 2  # sum of e^(x_i - x_m) / 2 over x_m and all scores below it
    for m in range(T - 1, -1, -1):
        below = below * (math.exp(x[m + 1] - x[m]) if m + 1 < T else 1.0) + 0.5
        if m == 0:
            step = math.log(below / k)
            return x[0] + step, step
        gap = x[m - 1] - x[m]
        shrink, excess = math.exp(-gap), m - k
        if excess - above[m - 1] + below * shrink > 0:
            continue
        root = math.sqrt(excess * excess + 4 * above[m - 1] * below * shrink)
        if excess > 0:
            b = x[m - 1] + math.log((excess + root) / (2 * above[m - 1]))
        elif excess < 0:
            b = x[m] + math.log(2 * below / (root - excess))
        else:
            b = x[m] + gap / 2 + math.log(below / above[m - 1]) / 2
        return b, min(abs(b - x[m]), abs(x[m - 1] - b))
    return np.nan, np.nan


@compiled
def slope(u):
    """The slope of log F at u, 1 below 0."""
    e = math.exp(-abs(u)) / 2
    return e / (1 - e) if u > 0 else 1.0


@compiled
def log_chance(u):
    """log F(u)."""
    return math.log1p(-math.exp(-u) / 2) if u > 0 else u - LOG_2
