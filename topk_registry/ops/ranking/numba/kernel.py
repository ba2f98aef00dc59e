"""One row of the loss over relaxed rankings, see README.md: a selection of the highest scores, their ranks, and at
masses one pass over all others."""
# pyright: reportCallIssue=false, reportArgumentType=false
# numba's intrinsics are called without their first parameter

import math
from functools import lru_cache

import numpy as np
import torch
from numba import carray

from topk_registry.ops import openmp
from topk_registry.ops.ksubset.numba import select
from topk_registry.ops.ksubset.numba.compiled import compiled, summing
from topk_registry.ops.rows.numba.compiled import BLOCK, c_function, exp, log
from topk_registry.ops.rows.numba.driver import ROW
from topk_registry.ops.rows.numba.vectors import nothing, total_of

KIND, CANDIDATES, K, TAU, COUNT, WEIGHTS = range(6)  # the kernel's numbers; weights are the last
NEURALSORT = 0
FAR = 1e30  # below the candidates: a class that is ruled out, with its cost still a number


@lru_cache
def row_kernel(dtype: torch.dtype) -> int:
    """The address of the row kernel that computes in this precision."""
    edition, real = openmp.edition(), np.float64 if dtype == torch.float64 else np.float32

    def body(n, s, m, y, mass, b, numbers, tensors, room, g):
        assert edition  # part of the cache's key: numba does not see that other files have changed
        s, m, g, number = (
            carray(s, n, real),
            carray(m, n, real),
            carray(g, n, real),
            carray(numbers, WEIGHTS, np.float64),
        )
        weights = carray(numbers, WEIGHTS + np.int64(number[COUNT]), np.float64)[WEIGHTS:]
        kind, candidates, k = np.int64(number[KIND]), min(np.int64(number[CANDIDATES]), n), np.int64(number[K])
        g[:] = 0
        total = total_of(s)
        if total != total or total == np.inf:
            return nothing(g)
        if y >= 0:
            return at_label(s, y, mass, kind, candidates, k, number[TAU], weights, g)
        return at_masses(s, m, kind, candidates, k, number[TAU], weights, g)

    return c_function(ROW, body)


@compiled
def at_label(s, y, mass, kind, candidates, k, tau, weights, g):
    """Equation 1 of the label among its candidates."""
    own = np.float64(s[y])
    top, where, size = highest(s, y, candidates - 1)
    if own == -np.inf:
        return np.inf
    if size < k:
        return nothing(g)
    x, place = np.empty(size + 1), size
    for j in range(size):
        x[j] = (np.float64(top[j]) - np.float64(top[0])) / tau
    while place > 0 and top[place - 1] < s[y]:
        x[place] = x[place - 1]
        place -= 1
    x[place] = (own - np.float64(top[0])) / tau
    logs, _ = ranks(x, kind, tau, weights)
    share, slopes = np.zeros(len(weights)), np.zeros(size + 1)
    cost = cost_at(logs, place, weights, share)
    for r in range(len(weights)):
        for i in range(size + 1):
            logs[r, i] = math.exp(logs[r, i]) * share[r]
        logs[r, place] -= share[r]
    pull(logs, kind, tau, slopes)
    for i in range(size + 1):
        j = i if i < place else i - 1
        g[y if i == place else where[j]] = mass * slopes[i] / tau
    return mass * cost


@compiled
def cost_at(logs, j, weights, share):
    """Equation 1 of the class j, and what each rank contributes to its sum."""
    best, total = -np.inf, 0.0
    for r in range(len(weights)):
        if weights[r] > 0:
            share[r] = logs[r, j] + math.log(weights[r])
            best = max(best, share[r])
    for r in range(len(weights)):
        share[r] = math.exp(share[r] - best) if weights[r] > 0 else 0.0
        total += share[r]
    for r in range(len(weights)):
        share[r] /= total
    return -best - math.log(total)


@compiled
def highest(s, skip, count):
    """The ``count`` highest scores, their classes, and how many of them are not ruled out."""
    top, where = np.empty(count, s.dtype), np.zeros(count, np.int64)
    if count > 0:
        select.largest(s, skip, top, where, select.room(len(s), count, s.dtype))
    size = count
    while size > 0 and top[size - 1] == -np.inf:
        size -= 1
    return top, where, size


@compiled
def ranks(x, kind, tau, weights):
    """Logarithms of the chances in softmax and in the ranks that count [R + 1, m], of descending scores x over tau; and
    of the sums that they are divided by. The others are -inf."""
    m, R = len(x), len(weights) - 1
    logs, norms = np.full((R + 1, m), -np.inf), np.zeros(R + 1)
    spread = np.zeros(m)
    for j in range(1, m):  # from step to step, so that no large sums cancel
        spread[j] += spread[j - 1] + j * (x[j - 1] - x[j])
    below = 0.0
    for j in range(m - 2, -1, -1):
        below += (m - 1 - j) * (x[j] - x[j + 1])
        spread[j] += below
    for r in range(R + 1):
        if weights[r] == 0:
            continue
        row, best = logs[r], -np.inf
        for i in range(m):
            if r == 0:
                row[i] = tau * x[i]
            elif kind == NEURALSORT:
                row[i] = (m + 1 - 2 * r) * x[i] - spread[i]
            else:
                row[i] = -abs(x[i] - x[r - 1])
            best = max(best, row[i])
        total = 0.0
        for i in range(m):
            total += math.exp(row[i] - best)
        norms[r] = best + math.log(total)
        for i in range(m):
            row[i] -= norms[r]
    return logs, norms


@compiled
def pull(cotangents, kind, tau, slopes):
    """Add the gradient to x of the cotangents of the ranks' logits [R + 1, m], which are in order of descending x."""
    R, m = len(cotangents) - 1, len(slopes)
    for i in range(m):
        slopes[i] += cotangents[0, i] * tau
    if kind == NEURALSORT:
        total, each = 0.0, np.zeros(m)
        for i in range(m):
            for r in range(1, R + 1):
                each[i] += cotangents[r, i]
                slopes[i] += cotangents[r, i] * (m + 1 - 2 * r)
            total += each[i]
        above = 0.0
        for i in range(m):
            below = total - above - each[i]
            slopes[i] -= (m - 1 - 2 * i) * each[i] + below - above
            above += each[i]
        return
    for r in range(1, R + 1):
        for i in range(m):
            sign = 1.0 if i < r - 1 else -1.0 if i > r - 1 else 0.0
            slopes[i] -= sign * cotangents[r, i]
            slopes[r - 1] += sign * cotangents[r, i]


@compiled
def at_masses(s, m, kind, candidates, k, tau, weights, g):
    """As :func:`at_label`, of every class: the highest ones share their ranks, all others the log sums of their rivals,
    by equations 4 and 5."""
    top, where, size = highest(s, -1, candidates)
    if size <= k:
        return nothing(g)
    R, x, slopes, value = len(weights) - 1, np.empty(size), np.zeros(size), 0.0
    for j in range(size):
        x[j] = (np.float64(top[j]) - np.float64(top[0])) / tau
    logs, _ = ranks(x, kind, tau, weights)
    share, pulled = np.zeros(R + 1), np.zeros(R + 1)
    own = np.zeros((R + 1, size))
    for j in range(size):
        mass, m[where[j]] = np.float64(m[where[j]]), 0
        if mass != 0:
            value += mass * cost_at(logs, j, weights, share)
            for r in range(R + 1):
                own[r, j] = mass * share[r]
                pulled[r] += own[r, j]
    for r in range(R + 1):
        for j in range(size):
            logs[r, j] = math.exp(logs[r, j]) * pulled[r] - own[r, j]
    pull(logs, kind, tau, slopes)
    if size < len(s):
        # with fewer scores than candidates, all others are ruled out, and only that they have no mass matters
        rivals = min(candidates - 1, size)
        value += of_others(s, m, x[:rivals], top[rivals - 1], kind, tau, weights, slopes, g)
    for j in range(size):
        g[where[j]] = slopes[j] / tau
    return value


@compiled
def of_others(s, m, x, low, kind, tau, weights, slopes, g):
    """The cost of the classes below the rivals x, with their gradient; that to the rivals is added to ``slopes``."""
    R, count, real = len(weights) - 1, len(x), s.dtype.type
    rivals, norms = ranks(x, kind, tau, weights)
    offsets, steps, logs, sums = np.zeros(R + 1), np.ones(R + 1), np.zeros(R + 1), np.zeros(R + 1)
    of_all = 0.0
    for j in range(count):
        of_all += x[j] - x[count - 1]
    for r in range(R + 1):
        logs[r] = math.log(weights[r]) if weights[r] > 0 else -np.inf
        if r == 0:
            offsets[r], steps[r] = norms[r] - tau * x[count - 1], tau
        elif kind == NEURALSORT:
            steps[r] = 2 * (count + 1 - r) - 1
            offsets[r] = norms[r] + of_all - (count + 1 - 2 * r) * x[count - 1]
        else:
            offsets[r] = norms[r] + x[r - 1] - x[count - 1]
    length, value = min(BLOCK, len(s)), 0.0
    parts, rests = np.empty((R + 1, length), s.dtype), np.empty((R + 1, length), s.dtype)
    best, below = np.empty(length, s.dtype), np.empty(length, s.dtype)
    for start in range(0, len(s), BLOCK):
        part, mass, slope = s[start : start + BLOCK], m[start : start + BLOCK], g[start : start + BLOCK]
        fall(part, low, real(1 / tau), below[: len(part)])
        value += cost_of(below[: len(part)], mass, offsets, steps, logs, parts, rests, best[: len(part)], slope, sums)
    scale = real(-1 / tau)
    for i in range(len(g)):
        g[i] *= scale
    all_sums = 0.0
    for r in range(R + 1):
        all_sums += sums[r] if r > 0 else 0.0
        for j in range(count):
            rivals[r, j] = math.exp(rivals[r, j]) * sums[r]
    pull(rivals, kind, tau, slopes[:count])
    for j in range(count):
        slopes[j] += all_sums if kind == NEURALSORT else sums[j + 1] if j < R else 0.0
    return value


@compiled
def fall(s, low, scale, below):
    """How far each score is below ``low``, over tau; 0 above it."""
    far, zero = s.dtype.type(FAR), s.dtype.type(0)
    for i in range(len(s)):
        d = (low - s[i]) * scale
        d = d if d < far else far
        below[i] = d if d > zero else zero


@compiled
def cost_of(below, mass, offsets, steps, logs, parts, rests, best, slope, sums):
    """The cost of a block of classes; their slopes in ``below``, and the slopes of the offsets added to ``sums``."""
    real, n, value = below.dtype.type, len(below), 0.0
    one, zero, least = real(1), real(0), real(FAR)
    for i in range(n):
        best[i] = real(np.inf)
        slope[i] = 0
    for r in range(len(logs)):
        if logs[r] > -np.inf:
            offset, step = real(offsets[r] - logs[r]), real(steps[r])
            for i in range(n):
                v = offset + step * below[i]
                best[i] = v if v < best[i] else best[i]
    total = np.zeros(n, below.dtype)
    for r in range(len(logs)):
        if logs[r] > -np.inf:
            offset, step, shift, part, rest = real(offsets[r]), real(steps[r]), real(logs[r]), parts[r], rests[r]
            for i in range(n):
                t = offset + step * below[i]
                not_p = one / (one + exp(-t))
                p = exp(best[i] - (t - shift)) * not_p
                part[i], rest[i] = p, not_p
                total[i] += p
    value += expected(mass, best, total, below, least)
    for r in range(len(logs)):
        if logs[r] > -np.inf:
            sums[r] += slopes_of(mass, total, parts[r], rests[r], real(steps[r]), slope)
    for i in range(n):
        slope[i] = slope[i] if below[i] < least else zero
    return value


@summing
def expected(mass, best, total, below, least):
    """The sum of the masses times the costs, infinite where a class that is ruled out has any."""
    value, none = 0.0, mass.dtype.type(0)
    for i in range(len(mass)):
        cost = best[i] - log(total[i])
        cost = cost if below[i] < least else mass.dtype.type(np.inf)
        value += np.float64(mass[i] * cost if mass[i] != none else none)
    return value


@summing
def slopes_of(mass, total, part, rest, step, slope):
    found = 0.0
    for i in range(len(mass)):
        h = mass[i] * (part[i] / total[i]) * rest[i]
        slope[i] += h * step
        found += np.float64(h)
    return found
