"""Passes over the scores of one row.

Long passes work in blocks that stay in the first-level cache, and take several steps of a recurrence at a time: loads
and stores are what costs them time.
"""

import math

import numpy as np

from topk_registry.ops.cpu.blocks import CACHE_BLOCK, FRONT, total
from topk_registry.ops.cpu.functions import log_of_normal, power_of_2
from topk_registry.ops.cpu.memory import zeros
from topk_registry.ops.cpu.numbers import LOG2E, compiled, power_of_2_64, summing, tiny


@compiled
def limits(s, theta):
    """Arguments of :func:`odds` beside the scores: log2(e) / theta, and the power of 2 below which odds are 0."""
    real = s.dtype.type
    return real(LOG2E / theta), real(0.4 * math.log2(tiny(s.dtype)))


@compiled
def _odds_of(score, a, inverse, floor, zero):
    u = (score - a) * inverse
    u = zero if u > zero else u
    u = floor if u < floor else u
    return zero if u == floor else power_of_2(u)


@summing
def _odds(row, a, inverse, floor, w):
    zero = w.dtype.type(0)
    mass = zero
    for i in range(len(row)):
        w[i] = _odds_of(row[i], a, inverse, floor, zero)
        mass += w[i]
    return mass


@compiled
def odds(row, a, inverse, floor, w):
    """w = exp(min((row - a) / theta, 0)), and 0 where that is too small to change anything; NaN stays NaN. Their sum is
    returned."""
    mass = 0.0
    for start in range(0, len(row), CACHE_BLOCK):
        mass += np.float64(_odds(row[start : start + CACHE_BLOCK], a, inverse, floor, w[start : start + CACHE_BLOCK]))
    return mass


@compiled
def reach(v, k, itemsize):
    """Return the number of powers of odds up to v < 1 that matter: the rest of their series is below rounding."""
    if v >= 0.95:
        return k
    count, power, least = 1, v, (2.0**-34 if itemsize == 4 else 2.0**-66) / k
    while power > least and count < k:
        power *= v
        count += 1
    return count


@compiled
def power_sums(w, P, scratch):
    """P[j - 1] = sum_i w_i^j, j = 1..k, four powers at a time. Odds whose last power would be denormal are left out of
    those four: their squares, at most 2^-48 of the largest (2^-400 in double precision), change no sum.
    """
    k, bits = len(P), 120.0 if w.itemsize == 4 else 1000.0
    P[:] = 0
    for start in range(0, len(w), CACHE_BLOCK):
        base = w[start : start + CACHE_BLOCK]
        v = scratch[: len(base)]
        if k <= 5:
            P[0] += total(base)
            if k > 1:
                _add_powers(
                    P, np.int64(1), _up_to_fifth(base, w.dtype.type(2.0**-24 if w.itemsize == 4 else 2.0**-200))
                )
            continue
        P[0] += _sum_and_copy(base, v)
        for j in range(1, k, 4):
            _add_powers(P, j, _four_powers(base, v, w.dtype.type(power_of_2_64(-bits / (j + 4)))))


@compiled
def _add_powers(P, j, sums):
    first, second, third, fourth = sums
    P[j] += first
    if j + 1 < len(P):
        P[j + 1] += second
    if j + 2 < len(P):
        P[j + 2] += third
    if j + 3 < len(P):
        P[j + 3] += fourth


@summing
def _sum_and_copy(base, v):
    total = v.dtype.type(0)
    for i in range(len(v)):
        total += base[i]
        v[i] = base[i]
    return total


@summing
def _up_to_fifth(base, least):
    """The sums of w^2, w^3, w^4 and w^5, for odds w above ``least``."""
    zero = base.dtype.type(0)
    first = second = third = fourth = zero
    for i in range(len(base)):
        w = base[i] if base[i] > least else zero
        square = w * w
        first += square
        second += square * w
        third += square * square
        fourth += square * w * square
    return first, second, third, fourth


@summing
def _four_powers(base, v, least):
    """The sums of v w, v w^2, v w^3 and v w^4, for odds w above ``least``; v <- v w^4."""
    zero = v.dtype.type(0)
    first = second = third = fourth = zero
    for i in range(len(v)):
        w = base[i] if base[i] > least else zero
        square = w * w
        one, two = v[i] * w, v[i] * square
        four = two * square
        first += one
        second += two
        third += one * square
        fourth += four
        v[i] = four
    return first, second, third, fourth


@compiled
def coefficients(k, dtype):
    """Memory for c_0..c_k, with zeros in front for :func:`in_fours`."""
    return zeros(FRONT + k + 1, dtype)


@compiled
def in_fours(c, stop, count):
    """The last ``count`` of c_0..c_{stop-1} for :func:`horner`, or a few more: a multiple of four of them. Further
    coefficients, and the zeros in front of c, change nothing."""
    return c[FRONT + stop - max(4, (count + 3) // 4 * 4) : FRONT + stop]


@compiled
def horner(v, c, d):
    """The last coefficient of c / (1 + v X), one quotient for every v; c is from :func:`in_fours`."""
    for i in range(len(v)):
        d[i] = c[3] - v[i] * (c[2] - v[i] * (c[1] - v[i] * c[0]))
    for j in range(4, len(c), 4):
        for i in range(len(v)):
            d[i] = c[j + 3] - v[i] * (c[j + 2] - v[i] * (c[j + 1] - v[i] * (c[j] - v[i] * d[i])))


@compiled
def label_gradient(w, c, scale, slope, count, scratch):
    """w <- slope v (d_{k-2} (1 + v) - 1), v = scale w, d = c / (1 + v X), c_{k-1} = c_k = 1, by the last ``count`` of
    the other coefficients."""
    k, one = len(c) - FRONT - 1, w.dtype.type(1)
    c = in_fours(c, k - 1, min(count, k - 1))
    if len(c) == 4:
        first, second, third, fourth = c[0], c[1], c[2], c[3]
        for i in range(len(w)):
            v = w[i] * scale
            d = fourth - v * (third - v * (second - v * first))
            w[i] = slope * v * (d * (one + v) - one)
        return
    for start in range(0, len(w), CACHE_BLOCK):
        v = w[start : start + CACHE_BLOCK]
        d = scratch[: len(v)]
        for i in range(len(v)):
            v[i] *= scale
        horner(v, c, d)
        for i in range(len(v)):
            v[i] = slope * v[i] * (d[i] * (one + v[i]) - one)


@compiled
def tail_margins(row, w, out, c, scale, a, theta, shift, count, scratch):
    """out <- (row - a) + theta (shift + log d_{k-1} - log d_k), v = scale w, d = c / (1 + v X), c_k = 1, by the last
    ``count`` of the other coefficients; w changes."""
    k, last = len(c) - FRONT - 1, w.dtype.type(1)
    c = in_fours(c, k, min(count, k))
    for start in range(0, len(row), CACHE_BLOCK):
        margins, scores = out[start : start + CACHE_BLOCK], row[start : start + CACHE_BLOCK]
        v = w[start : start + len(scores)]
        d = scratch[: len(v)]
        for i in range(len(v)):
            v[i] *= scale
        horner(v, c, d)
        for i in range(len(v)):
            margins[i] = (scores[i] - a) + theta * (log_of_normal(d[i] / (last - v[i] * d[i])) + shift)


@compiled
def add_slopes(w, slopes, lane, count, out, scratch):
    """out += sum_j slopes[j - 1, lane] w^j, j = 1..count: the gradient by way of the power sums' cotangents."""
    real = w.dtype.type
    if count <= 5:
        first, second = real(slopes[0, lane]), real(slopes[1, lane] if count > 1 else 0)
        third, fourth = real(slopes[2, lane] if count > 2 else 0), real(slopes[3, lane] if count > 3 else 0)
        fifth = real(slopes[4, lane] if count > 4 else 0)
        for i in range(len(w)):
            v = w[i]
            out[i] += v * (first + v * (second + v * (third + v * (fourth + v * fifth))))
        return
    for start in range(0, len(w), CACHE_BLOCK):
        odds, result = w[start : start + CACHE_BLOCK], out[start : start + CACHE_BLOCK]
        total = scratch[: len(odds)]
        for i in range(len(odds)):
            total[i] = real(slopes[count - 1, lane])
        j = count - 2
        while j >= 1:
            _two_steps(total, odds, real(slopes[j, lane]), real(slopes[j - 1, lane]))
            j -= 2
        if j == 0:
            _step(total, odds, real(slopes[0, lane]))
        for i in range(len(odds)):
            result[i] += total[i] * odds[i]


@compiled
def _two_steps(total, odds, slope, next):
    for i in range(len(odds)):
        total[i] = (total[i] * odds[i] + slope) * odds[i] + next


@compiled
def _step(total, odds, slope):
    for i in range(len(odds)):
        total[i] = total[i] * odds[i] + slope
