"""One row of sigmoids with a threshold, see README.md: a few passes over the row, whatever k is."""
# pyright: reportCallIssue=false, reportArgumentType=false
# numba's intrinsics are called without their first parameter

import math

import numpy as np

from topk_registry.ops.cpu.blocks import BLOCK, largest_of, total_of
from topk_registry.ops.cpu.functions import exp, log1p
from topk_registry.ops.cpu.memory import empty, zeros
from topk_registry.ops.cpu.numbers import compiled, summing
from topk_registry.ops.cpu.vectors import exponentials, nothing, scale_by
from topk_registry.ops.rows.numba.row import kernel_of_row, of_label

K, TAU = range(2)  # the kernel's numbers
LOW, HIGH, LOW_SLOPE, HIGH_SLOPE, ABOVE = range(5)  # sums over a row
# smaller sums are taken relative to the nearest score, long before exponentials leave single precision
LEAST_SUM = 1e-12
MOST_STEPS = 200  # 3 to 6 in practice, 40 where hundreds of scores lie far apart
PATIENCE = 6  # steps after which every third one leaps


@kernel_of_row(numbers=2)
def row(s, m, y, mass, b, number, at, room, g):
    return loss(s, m, y, mass, number[K], number[TAU], g)


row_of_label = of_label(row)


@compiled
def loss(s, m, y, mass, k, tau, g):
    """The loss; g is first e^-|x - b| relative to the nearest score of its side, then v, then the gradient."""
    real, a, scale = s.dtype.type, largest_of(s), 1 / tau
    total = exponentials(s, a, real(scale), g)
    if not (total < np.inf and possible(s) > k):
        return nothing(g)
    low, high = -np.inf, np.inf
    sums, near, step, stride, found = empty(5), zeros(2), np.nan, 1.0, False
    reference, rest = a, math.log(total / k)  # b as a score and what it is above that, by equation 4
    # half the root of the rounding, as the error after a step is its square; and the rounding of a gap's two sides
    enough, rounding = (1.7e-4, 5e-7) if s.itemsize == 4 else (7e-9, 1e-15)
    for turn in range(MOST_STEPS):
        nearest = real(np.float64(reference) + rest * tau)
        moved = (np.float64(nearest) - np.float64(reference)) * scale
        # relative to a score that is far away the bracket would have no digits left
        reference, rest, low, high = nearest, rest - moved, low - moved, high - moved
        step = log_step(s, reference, real(rest), real(scale), k, near, sums, g)
        if step != step:
            return nothing(g)
        rest += step
        found = abs(step) <= enough + (rounding * max(near[0], near[1]) if sums[ABOVE] == k else 0.0)
        if found:
            break
        low, high = (rest - step, high) if step > 0 else (low, rest - step)
        middle = (low + high) / 2
        if rest < low or rest > high:
            rest = middle
        elif turn > PATIENCE and turn % 3 == 0:
            stride *= 2
            leap = rest + (stride - 1) * step
            rest = min(leap, middle) if step > 0 else max(leap, middle)
    if not found:
        return nothing(g)
    around = reference, real(rest), real(scale), *factors(near, step, sums, k, real)
    if m is None or y >= 0:
        others = slopes(s[:y], around, g[:y]) + slopes(s[y + 1 :], around, g[y + 1 :])
        total = others + slopes(s[y : y + 1], around, g[y : y + 1])
        u = (np.float64(s[y]) - np.float64(reference)) * scale - rest
        e = math.exp(-abs(u))
        share = mass * scale * (e / (1 + e) if u > 0 else 1 / (1 + e))
        scale_by(g, real(share / total))
        g[y] = -share * (others / total)
        return mass * (math.log1p(e) - min(u, 0.0)) if mass != 0 else 0.0
    total = slopes(s, around, g)
    value = at_masses(s, m, around)
    subtract(g, m, real(total_of(m) * scale / total), real(scale))
    return value


@compiled
def factors(near, step, sums, k, real):
    """From e relative to each side's nearest score, before the last step, to e relative to one number; that number."""
    if near[0] > 0 and near[1] > 0 and sums[ABOVE] == k:  # across a gap both sides of equation 3 are equal
        most = max(sums[LOW], sums[HIGH])
        return real(sums[HIGH] / most), real(sums[LOW] / most), real(0)
    nearest = min(near[0] + step, near[1] - step)
    return (
        real(math.exp(nearest - near[0] - step)),
        real(math.exp(nearest - near[1] + step)),
        real(math.exp(-nearest)),
    )


@compiled
def possible(s):
    """How many scores are above -inf."""
    number = 0
    for i in range(len(s)):
        number += s[i] > -np.inf
    return number


@compiled
def log_step(s, reference, rest, scale, k, near, sums, g):
    """A step of Newton's method for equation 7, and g = e^-|x - b| relative to the nearest score of its side."""
    near[:] = 0
    sums_at(s, reference, rest, scale, near, sums, g)
    more = sums[ABOVE] - k
    if (more <= 0 and sums[LOW] < LEAST_SUM) or (more >= 0 and sums[HIGH] < LEAST_SUM):
        nearest(s, reference, rest, scale, near)
        sums_at(s, reference, rest, scale, near, sums, g)
    low, low_slope = side(sums[LOW], sums[LOW_SLOPE], near[0], more)
    high, high_slope = side(sums[HIGH], sums[HIGH_SLOPE], near[1], -more)
    return (low - high) / (low_slope + high_slope)


@compiled
def side(total, slope, near, more):
    """log of e^-near total, and of ``more`` beside it where that is positive; and its derivative."""
    if more <= 0:
        return math.log(total) - near, slope / total
    small = math.exp(-near)
    return math.log(more + small * total), small * slope / (more + small * total)


@compiled
def nearest(s, reference, rest, scale, near):
    """The distances to the nearest score that is not above b, and to the nearest that is; 0 where there is none."""
    real = s.dtype.type
    low = high = real(np.inf)
    for i in range(len(s)):
        u = (s[i] - reference) * scale - rest
        low = min(low, real(np.inf) if u > 0 else -u)
        high = min(high, u if u > 0 else real(np.inf))
    near[0] = low if low < np.inf else 0.0
    near[1] = high if high < np.inf else 0.0


@compiled
def sums_at(s, reference, rest, scale, near, sums, g):
    real = s.dtype.type
    low, high = real(near[0]), real(near[1])
    small_low, small_high = real(math.exp(-near[0])), real(math.exp(-near[1]))
    sums[:] = 0
    for start in range(0, len(s), BLOCK):
        stop = start + BLOCK
        of_block = _sums_at(s[start:stop], reference, rest, scale, low, high, small_low, small_high, g[start:stop])
        for j in range(5):
            sums[j] += np.float64(of_block[j])


@summing
def _sums_at(s, reference, rest, scale, low, high, small_low, small_high, g):
    zero, one = s.dtype.type(0), s.dtype.type(1)
    below = above = below_slope = above_slope = count = zero
    for i in range(len(s)):
        u = (s[i] - reference) * scale - rest
        is_above = u > zero
        e = exp((high if is_above else low) - abs(u))
        r = one / (one + e * (small_high if is_above else small_low))
        p = e * r
        v = p * r
        g[i] = e
        above += p if is_above else zero
        below += zero if is_above else p
        above_slope += v if is_above else zero
        below_slope += zero if is_above else v
        count += one if is_above else zero
    return below, above, below_slope, above_slope, count


@compiled
def slopes(s, around, g):
    """g <- v relative to the nearest score's, from e relative to each side's, and its sum."""
    total = 0.0
    for start in range(0, len(s), BLOCK):
        total += np.float64(_slopes(s[start : start + BLOCK], around, g[start : start + BLOCK]))
    return total


@summing
def _slopes(s, around, g):
    reference, rest, scale, low_factor, high_factor, small = around
    zero, one = s.dtype.type(0), s.dtype.type(1)
    total = zero
    for i in range(len(s)):
        u = (s[i] - reference) * scale - rest
        e = g[i] * (high_factor if u > zero else low_factor)
        r = one / (one + e * small)
        g[i] = e * r * r
        total += g[i]
    return total


@compiled
def at_masses(s, m, around):
    """The sum of m log(1 + e^-u), and m <- m (1 - p)."""
    value = 0.0
    for start in range(0, len(s), BLOCK):
        value += np.float64(_at_masses(s[start : start + BLOCK], m[start : start + BLOCK], around))
    return value


@summing
def _at_masses(s, m, around):
    reference, rest, scale = around[0], around[1], around[2]
    zero, one = s.dtype.type(0), s.dtype.type(1)
    total = zero
    for i in range(len(s)):
        u = (s[i] - reference) * scale - rest
        e = exp(-abs(u))
        r = one / (one + e)
        total += m[i] * (log1p(e) - min(u, zero)) if m[i] != zero else zero
        m[i] *= e * r if u > zero else r
    return total


@compiled
def subtract(g, m, factor, scale):
    for i in range(len(g)):
        g[i] = g[i] * factor - scale * m[i]
