"""The algorithm of torch/rows.py on a few rows: passes over the scores row by row (rows.py), then the small polynomials
of all of them at once (polynomial.py), then the last passes. A row that holds a NaN or too few scores gives NaN."""

import math
from collections import namedtuple

import numpy as np

from topk_registry.ops.cpu import blocks
from topk_registry.ops.cpu.memory import borrowed, empty, zeros
from topk_registry.ops.cpu.numbers import ZERO, compiled, largest_integer
from topk_registry.ops.ksubset.numba import groups, polynomial, rows
from topk_registry.ops.ksubset.numba.hinges import hinge_of, tail_cotangents

# Memory for labels' margins: scratch of the search for the top group; a row's scores x, the odds of each row, a block
# of a row, coefficients; for each row the size of its top group, tilt, largest odds, origin and the label's score;
# classes and odds of the top groups; and power sums.
LabelMemory = namedtuple("LabelMemory", "space x odds scratch c size u most a of_label where E power")
# The same for all classes, of both tilts.
BothMemory = namedtuple("BothMemory", "space x odds scratch c where E power")


@compiled
def label_memory(width, n, k, dtype):
    """Memory for :func:`label_rows` to work on up to ``width`` rows at a time."""
    m, x = blocks.padded(n), empty(blocks.padded(n), dtype)
    return LabelMemory(
        groups.space(m, k, dtype), x, empty((width, m), dtype), empty(blocks.CACHE_BLOCK, dtype),
        rows.coefficients(k, dtype), empty(width, np.int64), empty(width), empty(width),
        empty(width, dtype), empty(width, dtype), empty((width, min(3 * k, m)), np.int64),
        empty((width, min(3 * k, m))), empty(k),
    )  # fmt: skip


@compiled
def label_rows(s, is_bfloat16, label, k, theta, margin, gradient, alpha, scale, tau, factors, value, memory):
    """The margin of each row's label, and its gradient to the scores. The label's factor is left out from the start.

    With alpha [1] or [n], the value and the gradient are those of a hinge on the margin, times the row's factor. Scores
    may be in half precision, see :func:`blocks.load`; a row of s may be longer than n, the length of a gradient's.
    """
    (B, n), real = gradient.shape, memory.x.dtype.type
    space, x, odds, scratch, c, size, u, most, a, of_label, where, E, power = borrowed(memory)
    size, u, P, powers = size[:B], u[:B], zeros((k, B)), ZERO
    for r in range(B):
        y, size[r], u[r] = label[r], -1, 1.0
        if 0 <= y < n:
            blocks.load(s[r, :n], is_bfloat16, x)
            of_label[r], x[y] = x[y], -np.inf
            largest, mass = groups.odds_of_largest(x, theta, odds[r])
            size[r], a[r], u[r], most[r] = groups.split(
                x, largest, mass, k, k, groups.AT_LABEL, theta, space, odds[r], E[r], where[r]
            )
            if np.isnan(of_label[r]):
                size[r], u[r] = -1, 1.0
        if size[r] >= 0:
            count = groups.power_sums(odds[r], most[r], power, scratch)
            for j in range(count):
                P[j, r] = power[j]
            powers = max(powers, count)

    T = largest_integer(size)
    p, _, before, after = polynomial.top_group(E, size, u, P, powers, T)
    in_top = empty((T, B))
    polynomial.label_gradient(p, before, after, in_top)

    for r in range(B):
        w, rho = odds[r], polynomial.balanced(before, T, r, c)
        margin[r] = np.nan
        if size[r] >= 0:
            margin[r] = np.float64(of_label[r]) - np.float64(a[r]) + theta * math.log(u[r] * rho)
        value[r], of_margin = hinge_of(margin[r], label[r], alpha, scale, tau, factors[r])
        if size[r] < 0:
            blocks.fill(odds[r], real(np.nan))
            blocks.store(odds[r], is_bfloat16, gradient[r])
            continue
        count = rows.reach(most[r] * rho, k, odds.itemsize)
        rows.label_gradient(w, c, real(u[r] * rho), real(of_margin), count, scratch)
        for j in range(size[r]):
            w[where[r, j]] = of_margin * in_top[j, r]
        w[label[r]] = of_margin
        blocks.store(w, is_bfloat16, gradient[r])


@compiled
def margin_rows(s, k, theta, out, memory):
    """The margins of every class. Lanes from B on hold the second tilt, with k + 1 for k: for the k largest classes."""
    B, real, memory = len(s), s.dtype.type, borrowed(memory)
    size, where, kth, a, u, to_next, most, _, _, _, before, after = both_tilts(s, False, s.shape[1], k, theta, memory)
    odds, scratch, c = memory.odds, memory.scratch, memory.c
    T = len(before) - 1
    below, last = leave_one_out(before, after)
    for r in range(B):
        if size[r] < 0:
            blocks.fill(out[r], real(np.nan))
            continue
        rho = polynomial.balanced(before, T, r, c)
        shift, tilt = math.log(u[r] * rho), to_next[r] * u[r] * rho
        count = 1 + rows.reach(most[r] * rho, k, s.itemsize)
        rows.tail_margins(s[r], odds[r], out[r], c, real(tilt), kth[r], real(theta), real(shift), count, scratch)
        for j in range(size[r]):
            reference, lane = (a[r], B + r) if j < k else (kth[r], r)
            i = where[r, j]
            log_odds = math.log(u[lane] * below[j, lane] / last[j, lane])
            out[r, i] = np.float64(s[r, i]) - np.float64(reference) + theta * log_odds


@compiled
def margin_rows_backward(cotangent, s, k, theta, out, memory):
    """The vector-Jacobian product of ``margin_rows``."""
    (B, n), real, memory = s.shape, s.dtype.type, borrowed(memory)
    size, where, _, _, u, to_next, most, P, p, q, before, after = both_tilts(s, False, n, k, theta, memory)
    odds, scratch, c = memory.odds, memory.scratch, memory.c
    T = len(before) - 1
    g_below, g_product, g_c = zeros((T, 2 * B)), zeros((k + 1, 2 * B)), empty(k + 1)
    for r in range(B):
        if size[r] < 0:
            continue
        g = out[r]
        blocks.store(cotangent[r], False, g)
        for j in range(size[r]):
            g_below[j, B + r if j < k else r] = g[where[r, j]]
            g[where[r, j]] = 0
        rho = polynomial.balanced(before, T, r, c)
        terms = 1 + rows.reach(most[r] * rho, k, s.itemsize)
        tail_cotangents(odds[r, :n], c, terms, to_next[r] * u[r] * rho, g, g_c, scratch)
        product_cotangents(before[T], r, rho, g_c, g_product)
        for j in range(size[r]):
            g[where[r, j]] = cotangent[r, where[r, j]]
    below, last = leave_one_out(before, after)
    top_cotangents(size, u, to_next, P, p, q, before, after, below, last, g_below, g_product)
    for r in range(B):
        if size[r] < 0:
            blocks.fill(out[r], real(np.nan))
        else:
            add_slopes(r, size[r], where, odds[r, :n], most[r], P, g_below, out[r], scratch)


@compiled
def leave_one_out(before, after):
    """Coefficients k - 1 and k of the product without each factor: [T, lanes] both."""
    T, k, lanes = len(before) - 1, before.shape[1] - 1, before.shape[2]
    below, last = empty((T, lanes)), empty((T, lanes))
    for j in range(T):
        polynomial.without(before, after, j, k - 1, below[j])
        polynomial.without(before, after, j, k, last[j])
    return below, last


@compiled
def product_cotangents(product, lane, rho, g_c, g_product):
    """From cotangents of balanced coefficients to those of the product's own."""
    scale, back = 1 / product[len(g_c) - 1, lane], 1 / rho
    for j in range(len(g_c) - 1, -1, -1):
        g_product[j, lane] = g_c[j] * scale
        scale *= back


@compiled
def top_cotangents(size, u, to_next, P, p, q, before, after, below, last, g_below, g_product):
    """From the cotangents of the log-odds of the top group, ``g_below``, and of the whole product: P becomes the
    cotangents of the power sums of the tail's odds, times their powers, and g_below those of the top group's scores.
    """
    (k, lanes), T = P.shape, len(p)
    B = lanes // 2
    g_x, g_last = zeros((T, lanes)), zeros((T, lanes))
    for j in range(T):
        for i in range(lanes):
            if g_below[j, i] != 0:  # the other tilt may have made it 0 / 0
                g_last[j, i] = -g_below[j, i] / last[j, i]
                g_below[j, i] /= below[j, i]
    polynomial.cotangents(q, p, before, after, g_below, g_last, g_product, g_x)
    polynomial.power_sum_cotangents(P, before[0], g_product)
    for j in range(T):
        for r in range(B):
            g_below[j, r] = g_x[j, r] + g_x[j, B + r]
    for r in range(B):
        if size[r] < 0:
            continue
        first, second, largest = to_next[r] * u[r], u[B + r], 0.0
        for j in range(k):  # from cotangents of tilted power sums to those of the odds' powers
            P[j, r] = (j + 1) * (P[j, r] * first + P[j, B + r] * second)
            first, second = first * to_next[r] * u[r], second * u[B + r]
            largest = max(largest, abs(P[j, r]))
        for j in range(k):  # smaller ones make no difference, but could be denormal
            P[j, r] = P[j, r] if abs(P[j, r]) > 1e-20 * largest else 0.0


@compiled
def add_slopes(r, size, where, w, most, P, g_top, out, scratch):
    """Add to the direct gradient of a row what passes through the polynomials."""
    rows.add_slopes(w, P, r, rows.reach(most / (1 - most), len(P), w.itemsize), out, scratch)
    for j in range(size):
        out[where[r, j]] += g_top[j, r]


@compiled
def both_memory(width, n, k, dtype):
    """Memory for :func:`both_tilts` of up to ``width`` rows, and for what comes after it."""
    m = blocks.padded(n)
    return BothMemory(
        groups.space(m, k + 1, dtype), empty(m, dtype), empty((width, m), dtype),
        empty(4 * blocks.CACHE_BLOCK, dtype), rows.coefficients(k, dtype),
        empty((width, min(5 * k + 5, m)), np.int64), empty((2 * width, min(5 * k + 5, m))), empty(k),
    )  # fmt: skip


@compiled
def both_tilts(s, is_bfloat16, n, k, theta, memory):
    """First part of margins and their gradient: the tail's odds relative to the class after the k-th, in ``memory``,
    and the polynomials at both tilts. ``most``: the largest of the tail's odds, tilted."""
    B = len(s)
    space, x, odds, scratch, _, where, E, power = memory
    size, kth, a, most = empty(2 * B, np.int64), empty(B, x.dtype), empty(B, x.dtype), zeros(B)
    to_next, u, P, powers = blocks.ones(B, np.float64), blocks.ones(2 * B, np.float64), zeros((k, 2 * B)), ZERO
    for r in range(B):
        blocks.load(s[r, :n], is_bfloat16, x)
        largest, mass = groups.odds_of_largest(x, theta, odds[r])
        size[r], a[r], u[B + r], most[r] = groups.split(
            x, largest, mass, k, k + 1, groups.AT_ALL, theta, space, odds[r], E[B + r], where[r]
        )
        size[B + r], kth[r] = size[r], a[r]
        if size[r] < 0:
            u[B + r] = 1.0
            continue
        count = groups.power_sums(odds[r], most[r], power, scratch)
        powers = max(powers, count)
        u[r] = u[B + r]
        if size[r] > 0:  # else no class needs a second tilt
            kth[r] = space[0][k - 1]
            to_next[r] = math.exp((np.float64(a[r]) - np.float64(kth[r])) / theta)
            for j in range(size[r]):
                E[r, j] = x[where[r, j]]
            groups.to_odds(E[r, : size[r]], kth[r], theta)
            u[r] = groups.balance(E[r, : size[r]], power[0] * to_next[r], k, 0.0)
        factor = 1.0
        for j in range(count):
            factor *= to_next[r]
            P[j, r], P[j, B + r] = power[j] * factor, power[j]
    p, q, before, after = polynomial.top_group(E, size, u, P, powers, largest_integer(size))
    return size, where, kth, a, u, to_next, most, P, p, q, before, after
