"""The hinges of all classes of one row, weighted, and their gradient, for large k: see "Large k" in README.md."""
# pyright: reportCallIssue=false, reportArgumentType=false

import math
from collections import namedtuple

import numpy as np

from topk_registry.ops.cpu import blocks
from topk_registry.ops.cpu.memory import borrowed, empty, zeros
from topk_registry.ops.cpu.numbers import compiled, exp64, log64, summing
from topk_registry.ops.ksubset.numba import large, narrow
from topk_registry.ops.ksubset.numba.hinges import LEAST_TAU, LEAST_TERM, D, E, add_moments, horner_twice, tail_hinges
from topk_registry.ops.ksubset.numba.large_margins import (
    finish,
    gather_sides,
    row_memory,
    side_coefficients,
    split,
    tail_terms,
)
from topk_registry.ops.ksubset.numba.targets import FEW_CLASSES, gaps_and_gains, holds, masses, one_hinge

# Memory for a row, that of its margins; gaps and gains of the classes, or CACHE_BLOCK equal ones; and of narrow rows
# the expansion and room for its terms.
HingeMemory = namedtuple("HingeMemory", "row alphas gains expansion terms")


@compiled
def hinge_memory(width, n, k, dtype, alpha, tau):
    """Memory for :func:`hinge_rows`, which works on a row at a time; gaps and gains included."""
    row = row_memory(width, n, k, dtype)
    alphas, gains = gaps_and_gains(n, alpha, tau, dtype)
    return HingeMemory(row, alphas, gains, narrow.expand(n, 0, k, row.x.itemsize), zeros((10, narrow.MOST_TERMS + 1)))


@compiled
def hinge_rows(
    s, is_bfloat16, q, labels, shares, uniform, weight, alpha, factor, k, theta, scale, tau, value, out, memory
):  # fmt: skip
    """:func:`topk_registry.ops.ksubset.numba.expected.hinge_rows` for large k."""
    n, x, mass, d = out.shape[1], borrowed(memory.row.x), borrowed(memory.row.mass), borrowed(memory.row.odds)
    few, few_mass = empty(FEW_CLASSES, np.int64), empty(FEW_CLASSES)
    terms, tau = borrowed(memory.terms), max(tau, LEAST_TAU)
    for r in range(len(s)):
        blocks.load(s[r, :n], is_bfloat16, x)
        count = masses(r, q, labels, shares, uniform, weight, factor, mass[:n], few, few_mass)
        size, a, u = narrow.centred(x, n, theta, memory.expansion, d, terms[0], terms[1])
        if size > 0:
            value[r] = narrow_row(n, size, a, u, count, few, few_mass, alpha, k, theta, scale, tau, memory)
        else:
            value[r] = divided_row(count, few, few_mass, alpha, k, theta, scale, tau, memory)
        blocks.store(borrowed(memory.row.direct), is_bfloat16, out[r])


@compiled
def narrow_row(n, size, a, u, count, few, few_mass, alpha, k, theta, scale, tau, memory):
    """Return the hinge of a narrow row, of ``size`` terms; its gradient goes to memory."""
    expansion, terms, real = memory.expansion, borrowed(memory.terms), memory.row.x.dtype.type
    x, d, g = borrowed(memory.row.x), borrowed(memory.row.odds), borrowed(memory.row.direct)
    a_m, inverse, ratio, of_ratio = terms[1, : size + 1], terms[3, : size + 1], terms[4], terms[5]
    ratio[:] = 0
    of_equal = narrow.ratio_polynomial(a_m, n, k, expansion, terms[2, : size + 1], inverse, ratio[: size + 1])
    shift, total = math.log(u * of_equal), 0.0
    if count < 0:
        total = narrow.hinges(
            x, d, borrowed(memory.row.mass), memory.alphas, memory.gains, a, size, expansion, of_equal, shift, scale,
            tau, ratio, of_ratio, g, borrowed(memory.row.scratch),
        )  # fmt: skip
    else:
        blocks.fill(g, real(0))
        of_ratio[:] = 0
        for f in range(count):
            i = few[f]
            if few_mass[f] != 0:
                v, gap = np.float64(d[i]), np.float64(alpha[i if len(alpha) > 1 else 0])
                cost, own, through = narrow.hinge_of_class(
                    np.float64(x[i]), np.float64(a), v, few_mass[f], gap, shift, theta, scale, tau,
                    ratio[: size + 1], of_ratio,
                )  # fmt: skip
                total += cost
                g[i] += real(own + (expansion.p + v) * (1 - expansion.p - v) * through)
    narrow.ratio_slopes(a_m, expansion, inverse, ratio, of_ratio, terms[6:9], terms[9])
    narrow.add_slopes(d, expansion.p, terms[9], g)
    return total


@compiled
def divided_row(count, few, few_mass, alpha, k, theta, scale, tau, memory):
    """Return the hinge of a row whose classes are left out by division; its gradient goes to memory."""
    x, w, mass, g = (
        borrowed(memory.row.x), borrowed(memory.row.odds), borrowed(memory.row.mass), borrowed(memory.row.direct),
    )  # fmt: skip
    dc, where, of_tail = borrowed(memory.row.dc), borrowed(memory.row.where), borrowed(memory.row.c)
    real, lead = memory.row.x.dtype.type, len(memory.row.dc) // 2
    row = split(k, theta, memory.row)
    if row.size < 0:
        return np.nan
    lower, higher = gather_sides(row, alpha, count < 0, mass, few[: max(count, 0)], few_mass, memory.row)
    dc[lead:] = 0
    if count < 0:
        terms = tail_terms(row, k, x.itemsize)
        total = tail_hinges(
            x, w, mass, borrowed(memory.alphas), borrowed(memory.gains), row.kth, of_tail, terms, row.tilt, row.shift,
            scale, tau, g, dc[lead : lead + k + 1], borrowed(memory.row.scratch),
        )  # fmt: skip
    else:
        total = 0.0
        blocks.fill(g, real(0))
        for f in range(count):
            i = few[f]
            if few_mass[f] != 0 and not holds(where[: row.size], i):
                distance, v = np.float64(x[i]) - np.float64(row.kth), np.float64(w[i]) * row.tilt
                cost, slope = one_hinge(
                    distance, np.float64(alpha[i if len(alpha) > 1 else 0]), few_mass[f], v, of_tail[blocks.FRONT :],
                    row.shift, theta, scale, tau, dc[lead : lead + k + 1],
                )  # fmt: skip
                total += few_mass[f] * cost
                g[i] += real(slope)
    in_up, in_down = side_coefficients(row, k, memory.row)
    wide, low, high = borrowed(memory.row.wide), memory.row.massive_low, memory.row.massive_high
    total += side_hinges(lower, low, in_up, 1.0, theta, row.shift, scale, tau, dc, lead + k, row.below, wide)
    total += side_hinges(higher, high, in_down, -1.0, theta, row.shift, scale, tau, dc, lead + k, row.above, wide)
    finish(row, lower, higher, k, memory.row)
    return total


@compiled
def side_hinges(count, classes, c, sign, theta, shift, scale, tau, dc, center, reach, scratch):
    """Return the sum of the hinges of one side; their direct gradient goes to ``classes``, that of the coefficients is
    added to dc, whose ``center`` is that of c_k.

    With y and z from :func:`horner_twice`, d = 1 - v y, and sign = -1 downward, the log-odds are sign log(y / d)
    besides the class's own; chain = sign g / (y d),

        dL/ds = sign chain (y - v z),   dL/dc_{k - sign (1 + j)} = chain (-v)^j,   dL/dc_k = -chain y.
    """
    value = 0.0
    for start in range(0, large.padded(count), blocks.CACHE_BLOCK):
        stop = min(start + blocks.CACHE_BLOCK, large.padded(count))
        v, slope = borrowed(classes.v)[start:stop], borrowed(classes.slope)[start:stop]
        distance, mass = borrowed(classes.distance)[start:stop], borrowed(classes.mass)[start:stop]
        horner_twice(v, c, 1.0, scratch)
        margins_of(distance, scratch, sign * theta, theta * shift)
        cost, of_center = chains_of(distance, mass, borrowed(classes.gap)[start:stop], scratch, sign, scale, tau, slope)
        value += cost
        dc[center] -= of_center
        add_moments(scratch[E : E + len(v)], scratch[: len(v)], sign, dc, center, reach, LEAST_TERM)
    return value


@compiled
def margins_of(distance, scratch, theta, shift):
    """distance <- margins."""
    for i in range(len(distance)):
        y = scratch[D + i]
        distance[i] += theta * log64(y / (1.0 - scratch[i] * y)) + shift


@summing
def chains_of(margin, mass, gap, scratch, sign, scale, tau, slope):
    """The sums of the hinges and of chain y; the place of z <- chain."""
    value = of_center = 0.0
    for i in range(len(margin)):
        v, y, z = scratch[i], scratch[D + i], scratch[E + i]
        violation = gap[i] - scale * margin[i]
        far = -abs(violation) / tau
        e = exp64(far if far > -700.0 else -700.0)
        whole = 1.0 + e
        rest = whole - 1.0
        log1p = log64(whole) * (e / rest) if rest > 0.0 else e
        cost = (violation if violation > 0.0 else 0.0) + tau * log1p
        share = (1.0 if violation > 0.0 else e) / whole
        chain = -sign * mass[i] * scale * share / (y * (1.0 - v * y))
        value += mass[i] * cost
        of_center += chain * y
        slope[i] = sign * chain * (y - v * z)
        scratch[E + i] = chain
    return value, of_center
