"""The margins of all classes of one row, and their gradient, for large k: see "Large k" in README.md."""
# pyright: reportCallIssue=false, reportArgumentType=false

import math
from collections import namedtuple

import numpy as np

from topk_registry.ops.cpu import blocks
from topk_registry.ops.cpu.memory import borrowed, empty, zeros
from topk_registry.ops.cpu.numbers import ZERO, compiled, copy, log64, summing
from topk_registry.ops.ksubset.numba import groups, large, rows
from topk_registry.ops.ksubset.numba.hinges import (
    LEAST_TERM,
    E,
    add_moments,
    chains_of_cotangents,
    horner_twice,
    tail_cotangents,
)
from topk_registry.ops.ksubset.numba.targets import mass_among

# A row that is split: the size of its top group; the k-th largest score, and what margins are more from there on; the
# tilt of the tail's odds and the shift of the log-odds; the largest of the tail's odds, and how many power sums matter;
# how many coefficients below and above c_k matter, and classes are on either side of the top group; the coefficients.
Split = namedtuple("Split", "size kth beyond tilt shift most powers below above lower higher c")
# Classes of one side of the top group that have mass: odds or their reciprocals, scores less the k-th largest, masses,
# gaps, places; and their direct gradients.
Massive = namedtuple("Massive", "v distance mass gap where slope")
# Memory for a row: that of its split, its polynomial and the sides of its top group; masses, the direct gradient,
# cotangents of the coefficients and what becomes of them.
RowMemory = namedtuple(
    "RowMemory",
    "space x odds scratch wide c where E power polynomial low high massive_low massive_high mass direct dc series "
    "slopes",
)


@compiled
def row_memory(width, n, k, dtype):
    """Memory for :func:`margin_rows` and :func:`margin_rows_backward`, which work on a row at a time."""
    m = blocks.padded(n)
    most, x = min(5 * k + 5, m), empty(m, dtype)
    polynomial = large.polynomial_memory(k, n, x.itemsize)
    lead = len(polynomial.c) // 2
    return RowMemory(
        groups.space(m, k + 1, dtype), x, empty(m, dtype), empty(4 * blocks.CACHE_BLOCK, dtype),
        empty(4 * blocks.CACHE_BLOCK), rows.coefficients(k, dtype), empty(most, np.int64), empty(most),
        empty(large.powers_of(k)), polynomial, large.side(most), large.side(most), massive(most), massive(most),
        zeros(m, dtype), empty(m, dtype), zeros(2 * lead), zeros(lead), zeros((lead, 1)),
    )  # fmt: skip


@compiled
def massive(most):
    """Memory for the classes with mass of one side."""
    p = large.padded(most)
    return Massive(empty(p), empty(p), empty(p), empty(p), empty(p, np.int64), empty(p))


@compiled
def split(k, theta, memory):
    """Split the row in ``memory.x``; the size is -1, and ``memory.direct`` NaN, where it has NaN or too few scores."""
    E, where, of_tail = borrowed(memory.E), borrowed(memory.where), borrowed(memory.c)
    up, down = borrowed(memory.polynomial.up), borrowed(memory.polynomial.down)
    low, low_where = large.borrowed_side(memory.low)
    high, high_where = large.borrowed_side(memory.high)
    w, power, space = borrowed(memory.odds), borrowed(memory.power), groups.borrowed_space(memory.space)
    size, kth, beyond, u, gap, most, powers = groups.at_kth(
        borrowed(memory.x), k, theta, space, w, E, where, power, borrowed(memory.scratch)
    )
    if size < 0:
        c = borrowed(memory.polynomial.c)
        blocks.fill(borrowed(memory.direct), w.dtype.type(np.nan))
        return Split(size, kth, beyond, 1.0, 0.0, most, powers, ZERO, ZERO, ZERO, ZERO, c)
    c = large.multiply(E, size, u, power, powers, k, u * gap, memory.polynomial)
    rho, below, above, limit = large.balance(c, size, k, False, up, down, of_tail)
    lower, higher = large.divide(E, where, size, u * rho, limit, low, low_where, high, high_where)
    return Split(
        size, kth, beyond, gap * u * rho, math.log(u * rho), most, powers, below, above, lower, higher, c
    )  # fmt: skip


@compiled
def tail_terms(row, k, itemsize):
    """How many of the last coefficients before c_k matter to the tail."""
    return min(1 + rows.reach(row.most * row.tilt, k, itemsize), row.below)


@compiled
def side_coefficients(row, k, memory):
    """The coefficients that classes of either side are divided out of, for Horner's rule."""
    up, down = borrowed(memory.polynomial.up), borrowed(memory.polynomial.down)
    return rows.in_fours(up, k, row.below), rows.in_fours(down, len(down) - 2 - blocks.FRONT, row.above)


@compiled
def margin_rows(s, k, theta, out, memory):
    """:func:`topk_registry.ops.ksubset.numba.kernels.margin_rows` for large k."""
    for r in range(len(s)):
        blocks.load(s[r], False, borrowed(memory.x))
        row = split(k, theta, memory)
        if row.size >= 0:
            margin_row(row, k, theta, memory)
        blocks.store(borrowed(memory.direct), False, out[r])


@compiled
def margin_row(row, k, theta, memory):
    """The margins of a row that is split, into ``memory.direct``."""
    x, w, margins = borrowed(memory.x), borrowed(memory.odds), borrowed(memory.direct)
    of_tail, scratch, wide = borrowed(memory.c), borrowed(memory.scratch), borrowed(memory.wide)
    low, low_where = large.borrowed_side(memory.low)
    high, high_where = large.borrowed_side(memory.high)
    real = memory.x.dtype.type
    terms, (in_up, in_down) = tail_terms(row, k, x.itemsize), side_coefficients(row, k, memory)
    tilt, shift = real(row.tilt), real(row.shift)
    rows.tail_margins(x, w, margins, of_tail, tilt, row.kth, real(theta), shift, terms, scratch)
    side_margins(low, low_where, row.lower, in_up, 1.0, row, theta, x, wide, margins)
    side_margins(high, high_where, row.higher, in_down, -1.0, row, theta, x, wide, margins)


@compiled
def side_margins(v, where, count, c, sign, row, theta, x, scratch, out):
    """The margins of one side; sign = -1 downward, where v are reciprocals."""
    kth, beyond, shift = row.kth, row.beyond, row.shift
    for start in range(0, count, blocks.CACHE_BLOCK):
        part = v[start : min(start + blocks.CACHE_BLOCK, large.padded(count))]
        d = scratch[: len(part)]
        rows.horner(part, c, d)
        for j in range(len(part)):
            d[j] = log64(d[j] / (1.0 - part[j] * d[j]))
        for j in range(min(len(part), count - start)):
            i = where[start + j]
            out[i] = distance_of(x[i], kth, beyond) + theta * (sign * d[j] + shift)


@compiled
def distance_of(score, kth, beyond):
    """The score of a class of the top group less the k-th largest, and what margins are more from there on."""
    return np.float64(score) - np.float64(kth) + (beyond if score >= kth else 0.0)


@compiled
def margin_rows_backward(cotangent, s, k, theta, out, memory):
    """:func:`topk_registry.ops.ksubset.numba.kernels.margin_rows_backward` for large k."""
    for r in range(len(s)):
        blocks.load(s[r], False, borrowed(memory.x))
        row = split(k, theta, memory)
        if row.size >= 0:
            margin_row_backward(cotangent[r], row, k, memory)
        blocks.store(borrowed(memory.direct), False, out[r])


@compiled
def margin_row_backward(cotangent, row, k, memory):
    """The gradient of a row that is split, into ``memory.direct``."""
    x, w, g, dc = borrowed(memory.x), borrowed(memory.odds), borrowed(memory.direct), borrowed(memory.dc)
    of_tail, scratch, wide = borrowed(memory.c), borrowed(memory.scratch), borrowed(memory.wide)
    n, lead = len(cotangent), len(memory.dc) // 2
    no_gap, no_class, no_mass = zeros(1), empty(0, np.int64), empty(0)
    copy(cotangent, g[:n])
    g[n:] = 0
    lower, higher = gather_sides(row, no_gap, True, g, no_class, no_mass, memory)
    dc[lead:] = 0
    terms, (in_up, in_down) = tail_terms(row, k, x.itemsize), side_coefficients(row, k, memory)
    tail_cotangents(w, of_tail, terms, row.tilt, g, dc[lead : lead + k + 1], scratch)
    side_cotangents(lower, memory.massive_low, in_up, 1.0, dc, lead + k, row.below, wide)
    side_cotangents(higher, memory.massive_high, in_down, -1.0, dc, lead + k, row.above, wide)
    finish(row, lower, higher, k, memory)


@compiled
def gather_sides(row, alpha, dense, mass, few, few_mass, memory):
    """Gather the classes of both sides that have mass; return how many each side has."""
    low, low_where = large.borrowed_side(memory.low)
    high, high_where = large.borrowed_side(memory.high)
    x = borrowed(memory.x)
    return (
        gather(low[: row.lower], low_where, x, row, alpha, dense, mass, few, few_mass, memory.massive_low),
        gather(high[: row.higher], high_where, x, row, alpha, dense, mass, few, few_mass, memory.massive_high),
    )


@compiled
def gather(v, places, x, row, alpha, dense, mass, few, few_mass, massive):
    """Write the classes of a side that have mass to ``massive`` and return their number; their ``mass`` becomes 0."""
    count, kth, beyond = 0, row.kth, row.beyond
    for j in range(len(v)):
        i = places[j]
        m = np.float64(mass[i]) if dense else mass_among(i, few, few_mass)
        if dense:
            mass[i] = 0
        if m != 0:
            massive.v[count], massive.mass[count], massive.where[count] = v[j], m, i
            massive.distance[count] = distance_of(x[i], kth, beyond)
            massive.gap[count] = alpha[i if len(alpha) > 1 else 0]
            count += 1
    for j in range(count, large.padded(count)):
        massive.v[j] = massive.mass[j] = massive.distance[j] = massive.gap[j] = 0
    return count


@compiled
def side_cotangents(count, classes, c, sign, dc, center, reach, scratch):
    """From cotangents of the margins of one side, its masses, to their direct gradient and to cotangents of the
    coefficients; see :func:`add_moments`."""
    for start in range(0, large.padded(count), blocks.CACHE_BLOCK):
        stop = min(start + blocks.CACHE_BLOCK, large.padded(count))
        v, slope = borrowed(classes.v)[start:stop], borrowed(classes.slope)[start:stop]
        horner_twice(v, c, 1.0, scratch)
        copy(borrowed(classes.mass)[start:stop], slope)
        dc[center] -= chains_of_cotangents(slope, scratch, sign)
        add_moments(scratch[E : E + len(v)], scratch[: len(v)], sign, dc, center, reach, LEAST_TERM)


@compiled
def finish(row, lower, higher, k, memory):
    """Complete the gradient of a row from the tail's direct one, those of the sides, and the coefficients' cotangents:
    ``lower`` and ``higher`` classes of the sides have mass."""
    w, g, dc, wide = borrowed(memory.odds), borrowed(memory.direct), borrowed(memory.dc), borrowed(memory.wide)
    low, low_where = large.borrowed_side(memory.low)
    high, high_where = large.borrowed_side(memory.high)
    series, slopes, where = borrowed(memory.series), borrowed(memory.slopes), borrowed(memory.where)
    for j in range(row.size):
        g[where[j]] = 0
    add_direct(lower, memory.massive_low, g)
    add_direct(higher, memory.massive_high, g)
    lead, window, v = len(dc) // 2, row.below + row.above + 1, row.most * row.tilt
    terms = min(rows.reach(v / (1 - v), len(memory.power), w.itemsize), window)
    end, steps = lead + k + row.above + 1, (window + 3) // 4 * 4
    correlate(dc, row.c, end, window, terms, series)
    tail_slopes(series, terms, row.tilt, slopes)
    rows.add_slopes(w, slopes, 0, terms, g, borrowed(memory.scratch))
    add_through(low, low_where, row.lower, row.c, dc, end - steps, 1, steps, wide, g)
    add_through(high, high_where, row.higher, row.c, dc, end - 1, -1, steps, wide, g)


@compiled
def add_direct(count, classes, g):
    real, where, slope = g.dtype.type, borrowed(classes.where), borrowed(classes.slope)
    for j in range(count):
        g[where[j]] += real(slope[j])


@compiled
def correlate(dc, c, end, window, terms, series):
    """series[t - 1] <- sum_l dc_l c_{l - t}, t = 1..terms, over the last ``window`` coefficients before ``end``."""
    first = max(end - large.padded(window), terms + 3)
    for t in range(1, terms + 1, 4):
        sums = dots(dc[first:end], c[first - t - 3 : end - t])
        for j in range(min(4, terms + 1 - t)):
            series[t - 1 + j] = sums[3 - j]


@summing
def dots(x, y):
    """Products with y and with y less one, two and three of its first numbers."""
    first = second = third = fourth = 0.0
    for i in range(len(x)):
        first += x[i] * y[i]
        second += x[i] * y[i + 1]
        third += x[i] * y[i + 2]
        fourth += x[i] * y[i + 3]
    return first, second, third, fourth


@compiled
def tail_slopes(series, count, tilt, slopes):
    """slopes[j - 1] <- what w^j has in the gradient of the tail's scores, w being not tilted."""
    factor, largest = tilt, 0.0
    for j in range(count):
        slopes[j, 0] = series[j] * factor
        largest = max(largest, abs(slopes[j, 0]))
        factor *= -tilt
    for j in range(count):  # smaller ones make no difference, but could be denormal
        slopes[j, 0] = slopes[j, 0] if abs(slopes[j, 0]) > 1e-20 * largest else 0.0


@compiled
def add_through(v, where, count, c, dc, at, step, steps, scratch, g):
    """g += what passes through the polynomial for one side of the top group: ``steps`` coefficients from ``at`` on."""
    real = g.dtype.type
    for start in range(0, count, blocks.CACHE_BLOCK):
        part = v[start : min(start + blocks.CACHE_BLOCK, large.padded(count))]
        d, total = scratch[: len(part)], scratch[blocks.CACHE_BLOCK : blocks.CACHE_BLOCK + len(part)]
        d[:], total[:] = 0, 0
        for j in range(0, steps, 4):
            i = at + step * j
            four_steps(
                part, d, total, (c[i], c[i + step], c[i + 2 * step], c[i + 3 * step]),
                (dc[i], dc[i + step], dc[i + 2 * step], dc[i + 3 * step]),
            )  # fmt: skip
        for j in range(min(len(part), count - start)):
            g[where[start + j]] -= real(step * total[j])


@compiled
def four_steps(v, d, total, c, dc):
    """total += sum_j dc_j d_j, d_j = c_j - v d_{j-1}."""
    for i in range(len(v)):
        first = c[0] - v[i] * d[i]
        second = c[1] - v[i] * first
        third = c[2] - v[i] * second
        d[i] = c[3] - v[i] * third
        total[i] += (dc[0] * first + dc[1] * second) + (dc[2] * third + dc[3] * d[i])
