"""The hinges of many classes of a row at once, for targets that are distributions."""
# pyright: reportCallIssue=false, reportArgumentType=false

import math

import numpy as np
import torch

from topk_registry.ops.cpu.blocks import CACHE_BLOCK, largest_size
from topk_registry.ops.cpu.functions import log_of_normal
from topk_registry.ops.cpu.numbers import compiled, inlined, summing
from topk_registry.ops.hinge import invertible
from topk_registry.ops.ksubset.numba.rows import in_fours

LEAST_TAU = invertible(0.0, torch.float64)
LEAST_TERM = 1e-250  # of sums over one side of a top group, in double precision: smaller ones are 0


@compiled
def hinge(margin, alpha, scale, tau):
    """The hinge of a margin and its slope; see :class:`topk_registry.ops.hinge.Hinge`."""
    violation = alpha - scale * margin
    z = violation / tau
    e = math.exp(min(z, 40.0))
    value = violation if z > 40 else tau * math.log1p(e)
    return value, -scale * (e / (1 + e))


@compiled
def hinge_of(margin, y, alpha, scale, tau, factor):
    """The hinge of a row and its slope, both times its factor; 0 and 1 where alpha is empty: there is no hinge."""
    if len(alpha) == 0:
        return 0.0, 1.0
    if np.isnan(margin):  # the label may be no class
        return np.nan, np.nan
    value, slope = hinge(margin, alpha[y if len(alpha) > 1 else 0], scale, max(tau, LEAST_TAU))
    return factor * value, factor * slope


@compiled
def tail_hinges(row, w, mass, alpha, gain, a, c, powers, odds_scale, shift, scale, tau, g, dc, scratch):
    """Return the sum of the tail's hinges, weighted by ``mass``; g <- its direct gradient, dc <- its cotangents of c.

    Only the last ``powers`` coefficients before c_k matter. Rows are padded, with scores of -inf that have no mass.

    The hinge of a class is tau log(1 + exp(alpha / tau) / odds). With d = c / (1 + v X), v = odds_scale w, e = d /
    (1 + v X), x = d_k + gain v d_{k-1}, gain = exp(-alpha / tau), and r = 1 / (x d_{k-1}), one division and one
    logarithm make

        L = alpha + scale (a - s) + tau (log(x / d_{k-1}) - shift),   chain = -mass scale r,
        dL/ds = chain e_{k-1},   dL/dc_j = chain (-v)^(k-1-j),   dL/dc_k = -chain d_{k-1}.

    ``alpha`` and ``gain`` hold one number a class, or CACHE_BLOCK equal ones.
    """
    n, k, real, value = len(w), len(dc) - 1, w.dtype.type, 0.0
    powers = min(powers, k)
    per_class = len(alpha) > CACHE_BLOCK or len(alpha) == n
    last_five, c = c[len(c) - 6 : len(c) - 1], in_fours(c, k, powers)
    odds_scale, shift, scale, tau = real(odds_scale), real(shift), real(scale), real(tau)
    dc[:] = 0
    for start in range(0, n, CACHE_BLOCK):
        stop = min(start + CACHE_BLOCK, n)
        at = start if per_class else 0
        scores, odds, share, out = row[start:stop], w[start:stop], mass[start:stop], g[start:stop]
        gap, factor = alpha[at : at + len(odds)], gain[at : at + len(odds)]
        if powers <= 5:
            _chains_of_five(odds, last_five, odds_scale, share, factor, scale, scratch, out)
        else:
            horner_twice(odds, c, odds_scale, scratch)
            chains(share, factor, scale, scratch, out)
        cost, of_last = sum_of_hinges(scores, share, gap, scratch, a, shift, scale, tau)
        value += cost
        dc[k] -= of_last
        v, e = scratch[: len(odds)], scratch[E : E + len(odds)]
        if powers <= 5:
            sums = _five_moments(e, v)
            for j in range(powers):
                dc[k - 1 - j] += sums[j]
        else:
            _add_moments_of_tail(e, v, powers, dc)
    return value


@compiled
def tail_cotangents(w, c, powers, odds_scale, g, dc, scratch):
    """From the cotangents g of the tail's margins: g <- their direct gradient, dc <- cotangents of c. See
    :func:`tail_hinges`; here chain = g / (d_{k-1} (1 - v d_{k-1})) = g / d_{k-1} + v g / (1 - v d_{k-1})."""
    k, odds_scale = len(dc) - 1, w.dtype.type(odds_scale)
    powers = min(powers, k)
    c = in_fours(c, k, powers)
    dc[:] = 0
    for start in range(0, len(w), CACHE_BLOCK):
        odds, out = w[start : start + CACHE_BLOCK], g[start : start + CACHE_BLOCK]
        horner_twice(odds, c, odds_scale, scratch)
        dc[k] -= chains_of_cotangents(out, scratch, w.dtype.type(1))
        _add_moments_of_tail(scratch[E : E + len(odds)], scratch[: len(odds)], powers, dc)


@compiled
def add_moments(e, v, sign, dc, center, reach, least):
    """dc_{k - sign (1 + j)} += the sum of e (-v)^j, j < reach, with c_k at ``center``; e changes.

    Terms up to ``least`` are zero: they would be denormal numbers. The sign is -1 where v are reciprocals of odds.
    """
    step = np.int64(-sign)
    for j in range(0, reach, 3):
        first, second, third = moments(e, v, least)
        at = center + step * (1 + j)
        dc[at] += first
        if j + 1 < reach:
            dc[at + step] += second
        if j + 2 < reach:
            dc[at + 2 * step] += third


@compiled
def _add_moments_of_tail(e, v, powers, dc):
    """:func:`add_moments` of the tail, for about as many j as ``powers``."""
    k = len(dc) - 1
    add_moments(e, v, 1.0, dc, k, min(k, 3 * ((powers + 2) // 3)), e.dtype.type(1e-20) * largest_size(e))


# The loops below reach few arrays each, for the compiler checks any two that they might overlap, and gives up beyond a
# number of pairs. So v, d, e and x / d of a block are parts of one array.
D, E, COST = CACHE_BLOCK, 2 * CACHE_BLOCK, 3 * CACHE_BLOCK


@compiled
def _chains_of_five(w, c, odds_scale, mass, gain, scale, scratch, out):
    """:func:`horner_twice` and :func:`chains` of five coefficients at once."""
    first, second, third, fourth, fifth = c[0], c[1], c[2], c[3], c[4]
    one = w.dtype.type(1)
    for i in range(len(w)):
        v = odds_scale * w[i]
        z, y = first, second - v * first
        z, y = y - v * z, third - v * y
        z, y = y - v * z, fourth - v * y
        z, y = y - v * z, fifth - v * y
        x = one - v * y * (one - gain[i])
        r = one / (x * y)
        chain = -mass[i] * scale * r
        out[i] = chain * (y - v * z)
        scratch[i], scratch[D + i], scratch[E + i], scratch[COST + i] = v, y, chain, x * x * r


@compiled
def horner_twice(w, c, scale, scratch):
    """v <- scale w, d <- d_{k-1} and e <- e_{k-2}, the last coefficients of c / (1 + v X) and of c / (1 + v X)^2."""
    first, second, third, fourth = c[0], c[1], c[2], c[3]
    for i in range(len(w)):
        x = scale * w[i]
        z, y = first, second - x * first
        z, y = y - x * z, third - x * y
        z, y = y - x * z, fourth - x * y
        scratch[i], scratch[D + i], scratch[E + i] = x, y, z
    for j in range(4, len(c), 4):
        first, second, third, fourth = c[j], c[j + 1], c[j + 2], c[j + 3]
        for i in range(len(w)):
            x = scratch[i]
            z, y = scratch[D + i] - x * scratch[E + i], first - x * scratch[D + i]
            z, y = y - x * z, second - x * y
            z, y = y - x * z, third - x * y
            z, y = y - x * z, fourth - x * y
            scratch[D + i], scratch[E + i] = y, z


@compiled
def chains(mass, gain, scale, scratch, out):
    """e <- chain, out <- dL/ds, and x / d."""
    one = mass.dtype.type(1)
    for i in range(len(mass)):
        v, y = scratch[i], scratch[D + i]
        x = one - v * y * (one - gain[i])
        r = one / (x * y)
        chain = -mass[i] * scale * r
        out[i] = chain * (y - v * scratch[E + i])
        scratch[E + i], scratch[COST + i] = chain, x * x * r


@summing
def chains_of_cotangents(g, scratch, sign):
    """The sum of chain d, for cotangents g of margins: g <- their direct gradient, e <- chain. v, d and e are those of
    :func:`horner_twice`; the sign is -1 where v are reciprocals of odds. Where v is small a gradient is g and little
    else, to the rounding of that."""
    one, of_last = g.dtype.type(1), g.dtype.type(0)
    for i in range(len(g)):
        v, y = scratch[i], scratch[D + i]
        of_k = g[i] / (one - v * y)
        chain = g[i] / y + v * of_k
        g[i] -= v * (chain * scratch[E + i] - of_k * y)
        of_last += sign * of_k
        scratch[E + i] = sign * chain
    return of_last


@inlined
def distance(a, score):
    return a - score  # exact, so not to be reordered with other sums


@summing
def sum_of_hinges(scores, mass, alpha, scratch, a, shift, scale, tau):
    """The sums of mass L and of chain d."""
    zero = mass.dtype.type(0)
    value = of_last = zero
    for i in range(len(mass)):
        cost = alpha[i] + scale * distance(a, scores[i]) + tau * (log_of_normal(scratch[COST + i]) - shift)
        value += cost * mass[i] if mass[i] != zero else zero
        of_last += scratch[E + i] * scratch[D + i]
    return value, of_last


@summing
def _five_moments(e, v):
    """The sums of e, -v e, v^2 e, -v^3 e and v^4 e. Odds below 2^-20 are left out of the last three: their powers
    change nothing, but could be denormal."""
    zero, least = e.dtype.type(0), e.dtype.type(2.0**-20)
    first = second = third = fourth = fifth = zero
    for i in range(len(v)):
        w = v[i] if v[i] > least else zero
        square = w * w
        term = square * e[i]
        first += e[i]
        second -= v[i] * e[i]
        third += term
        fourth -= term * w
        fifth += term * square
    return first, second, third, fourth, fifth


@summing
def moments(e, v, least):
    """The sums of e, -v e and v^2 e; e <- -v^3 e, or zero where that is too small to matter but could be denormal."""
    zero = e.dtype.type(0)
    first, second, third = zero, zero, zero
    for i in range(len(v)):
        one = e[i]
        two = -v[i] * one
        two = two if abs(two) > least else zero
        three = -v[i] * two
        first += one
        second += two
        third += three
        term = -v[i] * three
        e[i] = term if abs(term) > least else zero
    return first, second, third
