"""One row of the loss over relaxed rankings, see README.md: a selection of the highest scores, their ranks, and at
masses one pass over all others."""
# pyright: reportCallIssue=false, reportArgumentType=false
# numba's intrinsics are called without their first parameter

import math

import numpy as np

from topk_registry.ops.cpu import select
from topk_registry.ops.cpu.functions import BLOCK, exp, log
from topk_registry.ops.cpu.jobs import address_of, array
from topk_registry.ops.cpu.numbers import NO_CLASS, compiled, summing
from topk_registry.ops.cpu.vectors import nothing, scale_by, total_of
from topk_registry.ops.rows.numba.row import of_label, row_kernel

KIND, CANDIDATES, K, TAU, COUNT, WEIGHTS = range(6)  # the kernel's numbers; weights are the last
NEURALSORT = 0
ROW_BLOCK = 2 * BLOCK  # classes at a time: each rank is a loop over them
FAR = 1e30  # below the candidates: a class that is ruled out, with its cost still a number
LEAST = 1e-280  # chances below are compared by their logarithms


@row_kernel(numbers=WEIGHTS)
def row(s, m, y, mass, b, number, at, room, g):
    count = np.int64(number[COUNT])
    weights = array(address_of(number), WEIGHTS + count, np.float64)[WEIGHTS:]
    kind, candidates, k = np.int64(number[KIND]), min(np.int64(number[CANDIDATES]), len(s)), np.int64(number[K])
    g[:] = 0
    total = total_of(s)
    if total != total or total == np.inf:
        return nothing(g)
    if m is None or y >= 0:
        return at_label(s, y, mass, kind, candidates, k, number[TAU], weights, g)
    return at_masses(s, m, kind, candidates, k, number[TAU], weights, g)


row_of_label = of_label(row)


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
    logits, chances, norms = ranks(x, kind, tau, weights)
    share, slopes = np.zeros(len(weights)), np.zeros(size + 1)
    cost = cost_at(logits, norms, place, weights, share)
    for r in range(len(weights)):
        row = chances[r]
        for i in range(size + 1):
            row[i] *= share[r]
        row[place] -= share[r]
    pull(chances, kind, tau, slopes)
    for i in range(size + 1):
        j = i if i < place else i - 1
        g[y if i == place else where[j]] = mass * slopes[i] / tau
    return mass * cost


@compiled
def cost_at(logits, norms, j, weights, share):
    """Equation 1 of the class j, and what each rank contributes to its sum."""
    best, total = -np.inf, 0.0
    for r in range(len(weights)):
        if weights[r] > 0:
            share[r] = logits[r, j] - norms[r] + math.log(weights[r])
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
    """Logits of softmax and of the ranks that count [R + 1, m], of descending scores x over tau, the chances, and the
    logarithms of the sums of exponentials [R + 1]. A rank that does not count has none."""
    m, R = len(x), len(weights) - 1
    logits, chances, norms = np.full((R + 1, m), -np.inf), np.zeros((R + 1, m)), np.zeros(R + 1)
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
        row, chance = logits[r], chances[r]
        if r == 0:
            for i in range(m):
                row[i] = tau * x[i]
        elif kind == NEURALSORT:
            factor = np.float64(m + 1 - 2 * r)
            for i in range(m):
                row[i] = factor * x[i] - spread[i]
        else:
            for i in range(m):
                row[i] = -abs(x[i] - x[r - 1])
        best = row[max(r - 1, 0)]  # rank r suits the r-th best
        for i in range(m):
            chance[i] = exp(row[i] - best)
        total = total_of(chance)
        norms[r] = best + math.log(total)
        scale_by(chance, 1 / total)
    return logits, chances, norms


@compiled
def pull(cotangents, kind, tau, slopes):
    """Add the gradient to x of the cotangents of the ranks' logits [R + 1, m], which are in order of descending x."""
    R, m = len(cotangents) - 1, len(slopes)
    for i in range(m):
        slopes[i] += cotangents[0, i] * tau
    if kind == NEURALSORT:
        each = np.zeros(m)
        for r in range(1, R + 1):
            row, factor = cotangents[r], np.float64(m + 1 - 2 * r)
            for i in range(m):
                each[i] += row[i]
            for i in range(m):
                slopes[i] += row[i] * factor
        total, above = total_of(each), 0.0
        for i in range(m):
            below = total - above - each[i]
            slopes[i] -= (m - 1 - 2 * i) * each[i] + below - above
            above += each[i]
        return
    for r in range(1, R + 1):
        row = cotangents[r]
        before, after = row[: r - 1], row[r:]
        slopes[r - 1] += total_of(before) - total_of(after)
        for i in range(len(before)):
            slopes[i] -= before[i]
        later = slopes[r:]
        for i in range(len(after)):
            later[i] += after[i]


@compiled
def at_masses(s, m, kind, candidates, k, tau, weights, g):
    """As :func:`at_label`, of every class: the highest ones share their ranks, all others the log sums of their rivals,
    by equations 4 and 5."""
    top, where, size = highest(s, NO_CLASS, candidates)
    if size <= k:
        return nothing(g)
    x, slopes = np.empty(size), np.zeros(size)
    for j in range(size):
        x[j] = (np.float64(top[j]) - np.float64(top[0])) / tau
    mass = np.empty(size)
    for j in range(size):
        mass[j], m[where[j]] = m[where[j]], 0
    value = of_highest(x, mass, kind, tau, weights, slopes)
    if size < len(s):
        # with fewer scores than candidates, all others are ruled out, and only that they have no mass matters
        rivals = min(candidates - 1, size)
        value += of_others(s, m, x[:rivals], top[rivals - 1], kind, tau, weights, slopes, g)
    for j in range(size):
        g[where[j]] = slopes[j] / tau
    return value


@compiled
def of_highest(x, mass, kind, tau, weights, slopes):
    """The cost of the candidates x with these masses; their gradient is added to ``slopes``."""
    logits, chances, norms = ranks(x, kind, tau, weights)
    m, value, total = len(x), 0.0, np.zeros(len(x))
    for r in range(len(weights)):
        row, weight = chances[r], weights[r]
        for i in range(m):
            total[i] += weight * row[i]
    for i in range(m):
        if mass[i] == 0:
            total[i] = 0.0  # becomes the mass over the total
        elif total[i] > LEAST:
            value -= mass[i] * math.log(total[i])
            total[i] = mass[i] / total[i]
        else:
            total[i] = -1.0  # chances that round to nothing: below, by their logarithms
    share = np.zeros((len(weights), m))
    for i in range(m):
        if total[i] < 0:
            column = np.zeros(len(weights))
            value += mass[i] * cost_at(logits, norms, i, weights, column)
            for r in range(len(weights)):
                share[r, i] = mass[i] * column[r]
            total[i] = 0.0
    for r in range(len(weights)):
        row, own, weight = chances[r], share[r], weights[r]
        for i in range(m):
            own[i] += weight * row[i] * total[i]
        pulled = total_of(own)
        for i in range(m):
            row[i] = row[i] * pulled - own[i]
    pull(chances, kind, tau, slopes)
    return value


@compiled
def of_others(s, m, x, low, kind, tau, weights, slopes, g):
    """The cost of the classes below the rivals x, with their gradient; that to the rivals is added to ``slopes``."""
    R, count, real = len(weights) - 1, len(x), s.dtype.type
    _, rivals, norms = ranks(x, kind, tau, weights)
    offsets, steps, sums = np.zeros(R + 1), np.ones(R + 1), np.zeros(R + 1)
    of_all = 0.0
    for j in range(count):
        of_all += x[j] - x[count - 1]
    for r in range(R + 1):
        if r == 0:
            offsets[r], steps[r] = norms[r] - tau * x[count - 1], tau
        elif kind == NEURALSORT:
            steps[r] = 2 * (count + 1 - r) - 1
            offsets[r] = norms[r] + of_all - (count + 1 - 2 * r) * x[count - 1]
        else:
            offsets[r] = norms[r] + x[r - 1] - x[count - 1]
    length, value = min(ROW_BLOCK, len(s)), 0.0
    below, numbers = np.empty(length, s.dtype), np.empty((5, length), s.dtype)
    parts = np.empty((R + 1, length), s.dtype)
    for start in range(0, len(s), ROW_BLOCK):
        stop = start + ROW_BLOCK
        part, mass, slope = s[start:stop], m[start:stop], g[start:stop]
        falls = below[: len(part)]
        fall(part, low, real(1 / tau), falls)
        value += cost_of(falls, mass, offsets, steps, weights, numbers, parts, slope, sums)
    scale = real(-1 / tau)
    for i in range(len(g)):
        g[i] *= scale
    all_sums = 0.0
    for r in range(R + 1):
        all_sums += sums[r] if r > 0 else 0.0
        row = rivals[r]
        for j in range(count):
            row[j] *= sums[r]
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
def cost_of(below, mass, offsets, steps, weights, numbers, parts, slope, sums):
    """The cost of a block of classes; their slopes in ``below``, and the slopes of the offsets added to ``sums``.

    Chances are relative to e^-best, where best is about the cost. A chance of rank r relative to the last rank R is
    exp(offset_R - offset_r) u^(R - r), u = exp((step_R - step_r) below / (R - r)) being the same for all r: so a class
    costs few exponentials however many ranks count.
    """
    real, n, R, value = below.dtype.type, len(below), len(weights) - 1, 0.0
    best, power, unit, total, softmax = numbers[0, :n], numbers[1, :n], numbers[2, :n], numbers[3, :n], numbers[4, :n]
    relative_to_best(below, offsets, steps, weights, best, power, softmax)
    for i in range(n):
        unit[i] = exp(-best[i])
    total[:], slope[:] = 0, 0
    if weights[0] > 0:
        add_rank(softmax, real(1 / weights[0]), real(weights[0]), unit, parts[0, :n], total)
    if R > 0:
        fade, u = real(steps[R] - steps[R - 1]) if R > 1 else real(0), softmax  # softmax has been added
        for i in range(n):
            u[i] = exp(fade * below[i])
        for r in range(R, 0, -1):
            factor = real(math.exp(offsets[R] - offsets[r]))
            add_rank(power, factor, real(weights[r]), unit, parts[r, :n], total)
            for i in range(n):
                power[i] *= u[i]
    value += expected(mass, best, total, below, real(FAR))
    for r in range(R + 1):
        if weights[r] > 0:
            sums[r] += slopes_of(total, parts[r, :n], real(steps[r]), slope)
    for i in range(n):
        slope[i] = slope[i] if below[i] < real(FAR) else real(0)
    return value


@compiled
def relative_to_best(below, offsets, steps, weights, best, power, softmax):
    """The exponent ``best``, and the chances of the last rank and of softmax times its weight relative to e^-best."""
    R, real = len(weights) - 1, below.dtype.type
    offset, step = real(offsets[R]), real(steps[R])
    if weights[0] == 0:
        for i in range(len(below)):
            best[i] = offset + step * below[i]
            power[i] = 1
        return
    first, slope = real(offsets[0] - math.log(weights[0])), real(steps[0])
    if R == 0:
        for i in range(len(below)):
            best[i] = first + slope * below[i]
            softmax[i] = 1
        return
    for i in range(len(below)):
        t, t_0 = offset + step * below[i], first + slope * below[i]
        best[i] = t if t < t_0 else t_0
        power[i] = exp(best[i] - t)
        softmax[i] = exp(best[i] - t_0)


@compiled
def add_rank(chance, factor, weight, unit, part, total):
    """Add the weight times the chances of a rank to ``total``; ``part`` is the same times 1 - P, the rank's slope."""
    one = chance.dtype.type(1)
    for i in range(len(chance)):
        q = factor * chance[i]
        rest = one / (one + q * unit[i])
        p = weight * q * rest
        part[i] = p * rest
        total[i] += p


@summing
def expected(mass, best, total, below, least):
    """The masses times the costs, added up, infinite where a class that is ruled out has any; total <- mass / total."""
    value, none = 0.0, mass.dtype.type(0)
    for i in range(len(mass)):
        cost = best[i] - log(total[i])
        cost = cost if below[i] < least else mass.dtype.type(np.inf)
        value += np.float64(mass[i] * cost if mass[i] != none else none)
        total[i] = mass[i] / total[i]
    return value


@summing
def slopes_of(share, part, step, slope):
    """The sum of the shares of a rank; slope += step times them."""
    found = share.dtype.type(0)
    for i in range(len(share)):
        h = share[i] * part[i]
        slope[i] += h * step
        found += h
    return np.float64(found)
