"""The margins of all classes of one row, and their gradient, for large k: see "Large k" in README.md."""
# pyright: reportCallIssue=false, reportArgumentType=false

import math
from collections import namedtuple

import numpy as np

from topk_registry.ops.cpu import blocks, points
from topk_registry.ops.cpu.memory import borrowed, empty, zeros
from topk_registry.ops.cpu.numbers import ZERO, compiled, copy, log64
from topk_registry.ops.ksubset.numba import groups, large, rows
from topk_registry.ops.ksubset.numba.hinges import LEAST_TERM, D, E, add_moments, chains_of_cotangents, horner_twice
from topk_registry.ops.ksubset.numba.targets import mass_among

# A row that is split: the size of its top group; the k-th largest score; ``beyond``, which is added to the margins of
# the k largest where the next score is more than FARTHEST temperatures lower, and 0 elsewhere; the tilt of the tail's
# odds and the shift of the log-odds; the scale of these odds among the points; how many coefficients below and above
# c_k matter, and classes are divided out downward; the coefficients.
Split = namedtuple("Split", "size kth beyond tilt shift scale below above higher c")
# Classes that are divided out downward and have mass: reciprocals of odds, scores less the k-th largest, masses, gaps,
# places; and their direct gradients.
Massive = namedtuple("Massive", "v distance mass gap where slope")
# Memory for a row: that of its split, its polynomial, the high classes and the points; masses, the direct gradient, and
# cotangents of the coefficients.
RowMemory = namedtuple(
    "RowMemory", "space x odds scratch wide where E power polynomial high massive points mass direct dc"
)


@compiled
def row_memory(width, n, k, dtype):
    """Memory for :func:`margin_rows` and :func:`margin_rows_backward`, which work on a row at a time."""
    m = blocks.padded(n)
    most, x = min(5 * k + 5, m), empty(m, dtype)
    polynomial = large.polynomial_memory(k, n, x.itemsize)
    return RowMemory(
        groups.space(m, k + 1, dtype), x, empty(m, dtype), empty(4 * blocks.CACHE_BLOCK, dtype),
        empty(4 * blocks.CACHE_BLOCK), empty(most, np.int64), empty(most), empty(large.powers_of(k)), polynomial,
        large.high_memory(most), massive(most), points.memory(points.count_of(x), dtype), zeros(m, dtype),
        empty(m, dtype), zeros(len(polynomial.c)),
    )  # fmt: skip


@compiled
def massive(most):
    """Memory for the high classes with mass."""
    p = large.padded(most)
    return Massive(empty(p), empty(p), empty(p), empty(p), empty(p, np.int64), empty(p))


@compiled
def split(a, mass, k, theta, memory):
    """Split the row in ``memory.x``, with the results of :func:`groups.odds_of_largest`; the size is -1, and
    ``memory.direct`` NaN, where it has NaN or too few scores."""
    E, where = memory.E, memory.where
    up, down = memory.polynomial.up, memory.polynomial.down
    w, power, space = memory.odds, memory.power, memory.space
    size, kth, beyond, u, to_next, most, powers = groups.at_kth(
        memory.x, a, mass, k, theta, space, w, E, where, power, memory.points, memory.scratch
    )
    if size < 0:
        c = memory.polynomial.c
        blocks.fill(memory.direct, w.dtype.type(np.nan))
        return Split(size, kth, beyond, 1.0, 0.0, 0.0, ZERO, ZERO, ZERO, c)
    c = large.multiply(E, size, u, power, powers, k, u * to_next, memory.polynomial)
    rho, below, above, limit = large.balance(c, size, k, False, up, down, w.itemsize)
    tilt = to_next * u * rho
    higher, largest = large.divide(E, where, size, u * rho, tilt, limit, w, memory.high)
    scale = points.place(max(largest, most * tilt), memory.points.v)
    return Split(size, kth, beyond, tilt, math.log(u * rho), scale, below, above, higher, c)


@compiled
def below_c_k(row, k, memory):
    """The coefficients below c_k that matter, for Horner's rule upward."""
    return rows.in_fours(memory.polynomial.up, k, row.below)


@compiled
def above_c_k(row, memory):
    """The coefficients above c_k that matter, for Horner's rule downward."""
    down = memory.polynomial.down
    return rows.in_fours(down, len(down) - 2 - blocks.FRONT, row.above)


@compiled
def divide_at_points(row, k, memory):
    """Compute v, d_{k-1} and e_{k-2} of :func:`horner_twice` at the points, into ``memory.wide``.

    Return the scale of odds that are not tilted yet.
    """
    horner_twice(memory.points.v, below_c_k(row, k, memory), 1.0, memory.wide)
    return memory.x.dtype.type(row.scale * row.tilt)


@compiled
def weigh_tail(row, k, memory):
    """:func:`divide_at_points`, and weights of the points that stand for the tail's classes with their masses."""
    scale = divide_at_points(row, k, memory)
    points.weigh(memory.odds, memory.mass, scale, memory.points, memory.scratch)
    return scale


@compiled
def add_tail(row, scale, k, memory):
    """Complete the tail's part of a gradient. Each point has in ``memory.wide`` the direct gradient of a class of mass
    1, and its weight has become that of the classes' chains; ``scale`` is from :func:`weigh_tail`."""
    at, dc = memory.points, memory.dc
    c = at.c[: len(at.v)]
    points.fit(memory.wide[: len(at.v)], at.terms, c)
    blocks.fill(memory.direct, memory.direct.dtype.type(0))
    points.add_products(memory.mass, memory.odds, scale, c, memory.direct)
    add_moments(at.weights, at.v, 1.0, dc, len(dc) // 2 + k, row.below, LEAST_TERM)


@compiled
def margin_rows(s, k, theta, out, memory):
    """:func:`topk_registry.ops.ksubset.numba.kernels.margin_rows` for large k."""
    memory = borrowed(memory)
    for r in range(len(s)):
        blocks.load(s[r], False, memory.x)
        a, mass = groups.odds_of_largest(memory.x, theta, memory.odds)
        row = split(a, mass, k, theta, memory)
        if row.size >= 0:
            margin_row(row, k, theta, memory)
        blocks.store(memory.direct, False, out[r])


@compiled
def margin_row(row, k, theta, memory):
    """The margins of a row that is split, into ``memory.direct``."""
    at, wide, real = memory.points, memory.wide, memory.x.dtype.type
    scale = divide_at_points(row, k, memory)
    log_odds, c = wide[: len(at.v)], at.c[: len(at.v)]
    for m in range(len(at.v)):
        y = wide[D + m]
        log_odds[m] = math.log(y / (1 - at.v[m] * y))
    points.fit(log_odds, at.terms, c)
    tail_margins(memory.x, memory.odds, row.kth, real(theta), real(row.shift), scale, c, memory.direct)
    high_margins(row, theta, memory)


@compiled
def tail_margins(x, w, a, theta, shift, scale, c, out):
    """The margins of all classes but the high ones, whose log-odds besides their own are fitted."""
    one, last = w.dtype.type(1), points.count_of(w) - 1
    for i in range(len(x)):
        z, log_odds = scale * w[i] - one, c[last]
        for j in range(last - 1, -1, -1):
            log_odds = log_odds * z + c[j]
        out[i] = (x[i] - a) + theta * (log_odds + shift)


@compiled
def high_margins(row, theta, memory):
    """The margins of the high classes."""
    x, out, wide = memory.x, memory.direct, memory.wide
    v, where, c = memory.high.v, memory.high.where, above_c_k(row, memory)
    for start in range(0, row.higher, blocks.CACHE_BLOCK):
        part = v[start : min(start + blocks.CACHE_BLOCK, large.padded(row.higher))]
        d = wide[: len(part)]
        rows.horner(part, c, d)
        for j in range(len(part)):
            d[j] = log64(d[j] / (1.0 - part[j] * d[j]))
        for j in range(min(len(part), row.higher - start)):
            i = where[start + j]
            out[i] = distance_of(x[i], row.kth, row.beyond) + theta * (row.shift - d[j])


@compiled
def distance_of(score, kth, beyond):
    """The score of a class of the top group less the k-th largest, with ``beyond`` added for the k largest."""
    return np.float64(score) - np.float64(kth) + (beyond if score >= kth else 0.0)


@compiled
def margin_rows_backward(cotangent, s, k, theta, out, memory):
    """:func:`topk_registry.ops.ksubset.numba.kernels.margin_rows_backward` for large k."""
    memory = borrowed(memory)
    for r in range(len(s)):
        blocks.load(s[r], False, memory.x)
        a, mass = groups.odds_of_largest(memory.x, theta, memory.odds)
        row = split(a, mass, k, theta, memory)
        if row.size >= 0:
            margin_row_backward(cotangent[r], row, k, memory)
        blocks.store(memory.direct, False, out[r])


@compiled
def margin_row_backward(cotangent, row, k, memory):
    """The gradient of a row that is split, into ``memory.direct``; see :func:`chains_of_cotangents`."""
    dc, wide, weights, lead = memory.dc, memory.wide, memory.points.weights, len(memory.dc) // 2
    copy(cotangent, memory.mass[: len(cotangent)])
    massive = gather(row, zeros(1), True, memory.mass, empty(0, np.int64), empty(0), memory)
    dc[lead:] = 0
    scale = weigh_tail(row, k, memory)
    for m in range(len(weights)):
        v, y = wide[m], wide[D + m]
        of_k = 1 / (1 - v * y)
        chain = 1 / y + v * of_k
        wide[m] = 1 - v * (chain * wide[E + m] - of_k * y)
        dc[lead + k] -= weights[m] * of_k
        weights[m] *= chain
    add_tail(row, scale, k, memory)
    high_cotangents(massive, row, k, memory)
    finish(row, massive, k, memory)


@compiled
def gather(row, alpha, dense, mass, few, few_mass, memory):
    """Write the high classes that have mass to ``memory.massive`` and return their number; their ``mass`` becomes 0."""
    count, kth, beyond, massive, x = 0, row.kth, row.beyond, memory.massive, memory.x
    v, places = memory.high.v, memory.high.where
    for j in range(row.higher):
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
def high_cotangents(count, row, k, memory):
    """From cotangents of the margins of high classes, their masses, to their direct gradient and to cotangents of the
    coefficients."""
    classes, wide, dc = memory.massive, memory.wide, memory.dc
    c, center = above_c_k(row, memory), len(memory.dc) // 2 + k
    for start in range(0, large.padded(count), blocks.CACHE_BLOCK):
        stop = min(start + blocks.CACHE_BLOCK, large.padded(count))
        v, slope = classes.v[start:stop], classes.slope[start:stop]
        horner_twice(v, c, 1.0, wide)
        copy(classes.mass[start:stop], slope)
        dc[center] -= chains_of_cotangents(slope, wide, -1.0)
        add_moments(wide[E : E + len(v)], wide[: len(v)], -1.0, dc, center, row.above, LEAST_TERM)


@compiled
def finish(row, massive, k, memory):
    """Complete the gradient of a row from the tail's direct one, that of the high classes, and the coefficients'
    cotangents: ``massive`` of the high classes have mass."""
    g, dc, wide, at = memory.direct, memory.dc, memory.wide, memory.points
    real, high, where, w = g.dtype.type, memory.high.v, memory.high.where, memory.odds
    for j in range(row.higher):
        g[where[j]] = 0
    slope, places = memory.massive.slope, memory.massive.where
    for j in range(massive):
        g[places[j]] += real(slope[j])
    end, steps = len(dc) // 2 + k + row.above + 1, (row.below + row.above + 4) // 4 * 4
    v, c = at.v, at.c[: len(at.v)]
    through(v, row.c, dc, end - steps, 1, steps, wide)
    for m in range(len(v)):
        wide[m] *= row.tilt
    points.fit(wide[: len(v)], at.terms, c)
    points.add_products(w, w, row.scale * row.tilt, c, g)
    for start in range(0, row.higher, blocks.CACHE_BLOCK):
        part = high[start : min(start + blocks.CACHE_BLOCK, large.padded(row.higher))]
        through(part, row.c, dc, end - 1, -1, steps, wide)
        for j in range(min(len(part), row.higher - start)):
            g[where[start + j]] -= real(part[j] * wide[j])


@compiled
def through(v, c, dc, at, step, steps, scratch):
    """The first numbers of ``scratch`` <- sum_j dc_j d_{j - step}, over ``steps`` coefficients from ``at`` on."""
    total, d = scratch[: len(v)], scratch[blocks.CACHE_BLOCK : blocks.CACHE_BLOCK + len(v)]
    d[:], total[:] = 0, 0
    for j in range(0, steps, 4):
        i = at + step * j
        four_steps(
            v, d, total, (c[i], c[i + step], c[i + 2 * step], c[i + 3 * step]),
            (dc[i], dc[i + step], dc[i + 2 * step], dc[i + 3 * step]),
        )  # fmt: skip


@compiled
def four_steps(v, d, total, c, dc):
    """total += sum_j dc_j d_{j-1}, d_j = c_j - v d_{j-1}."""
    for i in range(len(v)):
        first = c[0] - v[i] * d[i]
        second = c[1] - v[i] * first
        third = c[2] - v[i] * second
        total[i] += (dc[0] * d[i] + dc[1] * first) + (dc[2] * second + dc[3] * third)
        d[i] = c[3] - v[i] * third
