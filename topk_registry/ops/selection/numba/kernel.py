"""One row of the top-k hinges, see README.md: the k + 1 largest scores, and a gradient at those and the label."""
# pyright: reportCallIssue=false, reportArgumentType=false
# numba's intrinsics are called without their first parameter

import numpy as np

from topk_registry.ops.cpu import select
from topk_registry.ops.cpu.blocks import total_of
from topk_registry.ops.cpu.memory import array, empty, zeros
from topk_registry.ops.cpu.numbers import NO_CLASS, compiled
from topk_registry.ops.cpu.vectors import nothing
from topk_registry.ops.rows.numba.hinges import hinge, hinges
from topk_registry.ops.rows.numba.row import kernel_of_row, of_label

KIND, K, ALPHA, FACTOR = range(4)  # the kernel's numbers
RIVAL, RANK, CONVEX = range(3)  # what the label's score is held against
OWN = 0  # the kernel's tensor


@kernel_of_row(numbers=4, operands=1)
def row(s, m, y, mass, b, number, at, room, g):
    kind, k, alpha, factor = np.int64(number[KIND]), np.int64(number[K]), number[ALPHA], number[FACTOR]
    own = array(at[OWN], len(s) if at[OWN] != 0 else 0, s.dtype)
    if total_of(s) * 0 != 0 and has_nan(s):
        return nothing(g)
    if m is None or y >= 0:
        return at_label(s, y, mass, kind, k, own, alpha, factor, g)
    return at_masses(s, m, kind, k, own, alpha, factor, g)


row_of_label = of_label(row)


@compiled
def has_nan(x):
    nans = 0
    for i in range(len(x)):
        nans += x[i] != x[i]
    return nans > 0


@compiled
def largest(s, skip, count):
    """The ``count`` largest scores and their classes, the class ``skip`` left out."""
    top, where = empty(count, s.dtype), zeros(count, np.int64)
    select.largest(s, skip, top, where, select.room(len(s), count, s.dtype))
    return top, where


@compiled
def at_label(s, y, mass, kind, k, own, alpha, factor, g):
    real = s.dtype.type
    g[:] = 0
    if kind == CONVEX:
        top, where = largest(s, y, k)
        total = 0.0
        for j in range(k - 1):
            total += np.float64(top[j])
        score, last = np.float64(s[y]), np.float64(top[k - 1]) + 1
        value = (total + k - 1 + max(last, score)) / k - score
        if not value >= 0:
            return value if value != value else 0.0
        shared = 1.0 if score > last else 0.5 if score == last else 0.0
        for j in range(k - 1):
            g[where[j]] = real(mass / k)
        g[where[k - 1]] += real(mass * (1 - shared) / k)
        g[y] += real(mass * (shared / k - 1))
        return mass * value
    top, where = largest(s, y if kind == RIVAL else NO_CLASS, k if kind == RIVAL else k + 1)
    last = len(top) - 1
    value, slope = hinge(s, y, mass, np.float64(top[last]), own, alpha, factor, 1.0, g)
    g[where[last]] += real(slope)
    return value


@compiled
def at_masses(s, m, kind, k, own, alpha, factor, g):
    """Classes outside the top k share one threshold; those inside have another, and are looked at one by one."""
    real, inside = s.dtype.type, empty(k)
    top, where = largest(s, NO_CLASS, k + 1)
    if kind == RANK:
        value, slope = hinges(s, m, np.float64(top[k]), own, alpha, factor, 1.0, g)
        g[where[k]] += real(slope)
        return value
    for j in range(k):
        inside[j], m[where[j]] = m[where[j]], 0
    if kind == CONVEX:
        return convex_masses(s, m, k, top, where, inside, g)
    value, slope = hinges(s, m, np.float64(top[k - 1]), own, alpha, factor, 1.0, g)
    g[where[k - 1]] += real(slope)
    for j in range(k):
        if inside[j] != 0:
            more, slope = hinge(s, where[j], inside[j], np.float64(top[k]), own, alpha, factor, 1.0, g)
            value += more
            g[where[k]] += real(slope)
    return value


@compiled
def convex_masses(s, m, k, top, where, inside, g):
    real, none = s.dtype.type, empty(0, s.dtype)
    total = 0.0
    for j in range(k):
        total += np.float64(top[j])
    value, slope = hinges(s, m, total / k, none, 1.0, 1.0, 1.0, g)
    last = np.float64(top[k]) + 1
    for j in range(k):
        g[where[j]] += real(slope / k)
    for j in range(k):
        mass, score = inside[j], np.float64(top[j])
        loss = (total - score + k - 1 + max(last, score)) / k - score
        if mass != 0 and loss >= 0:
            value += mass * loss
            for i in range(k):
                g[where[i]] += real(mass / k) if i != j else real(0)
            shared = 1.0 if score > last else 0.5 if score == last else 0.0
            g[where[k]] += real(mass * (1 - shared) / k)
            g[where[j]] += real(mass * (shared / k - 1))
        elif mass != 0 and loss != loss:
            return loss
    return value
