"""Loops over the scores of one row on the CPU, in single precision, compiled by numba.

Long loops process blocks of scores that fit in the first-level cache. For each number that a loop reads, the loop
computes several powers or steps of Horner's rule at once, because loads and stores take most of the time.
"""

import math

import numpy as np

from topk_registry.ops.cpu.blocks import CACHE_BLOCK, fill, largest_size
from topk_registry.ops.cpu.numbers import LOG2E, ZERO, borrowing, compiled, inlined, log32, power_of_2_32, summing

GROUP = 128  # number of neighbouring classes that are skipped if none of them has mass; divides CACHE_BLOCK
FRONT = 4  # number of zeros in front of the coefficients, see first_of
FLOOR = np.float32(-50.4)  # odds below 2^FLOOR become 0, because products of them would be slow denormal numbers
# The scratch memory of a block holds v, d, e and x / d of :func:`tail_hinges`, from the indices 0, D, E and COST on.
# These share one array, because the compiler checks each pair of arrays in a loop for overlap. If a loop uses many
# arrays, the compiler gives up and omits vector instructions.
D, E, COST = CACHE_BLOCK, 2 * CACHE_BLOCK, 3 * CACHE_BLOCK


@summing
def _odds(row, a, inverse, w):
    zero = np.float32(0)
    mass = zero
    for i in range(len(row)):
        u = (row[i] - a) * inverse
        u = zero if u > zero else u
        u = FLOOR if u < FLOOR else u
        w[i] = zero if u == FLOOR else power_of_2_32(u)
        mass += w[i]
    return mass


@borrowing
def odds(row, a, theta, w):
    """Write the odds w = exp(min((s - a) / theta, 0)) of the scores s in ``row``, and return the sum of the odds.

    Here, a is a reference score, and theta is the temperature. Odds below 2^FLOOR become 0. The odds of NaN are NaN.
    """
    mass, inverse = 0.0, np.float32(LOG2E / theta)
    for start in range(0, len(row), CACHE_BLOCK):
        mass += np.float64(_odds(row[start : start + CACHE_BLOCK], a, inverse, w[start : start + CACHE_BLOCK]))
    return mass


@borrowing
def reach(v, k):
    """Return the smallest j with v^j <= 2^-34 / k, but at most k.

    If no odds exceed v < 1, sums need only the powers 1..j, because higher powers are below the rounding error.
    """
    if v >= 0.95:
        return k
    count, power, least = 1, v, 2.0**-34 / k
    while power > least and count < k:
        power *= v
        count += 1
    return count


@borrowing
def power_sums(w, P, scratch):
    """Write the power sums P[j - 1] = sum_i w_i^j of the odds w, for j from 1 to len(P).

    From j = 2 on, tiny odds are skipped, because their powers could be denormal numbers, which are slow. The powers of
    these odds are too small to change a sum. ``scratch`` is memory for CACHE_BLOCK numbers.
    """
    P[:] = 0
    for start in range(0, len(w), CACHE_BLOCK):
        base = w[start : start + CACHE_BLOCK]
        v = scratch[: len(base)]
        _add_powers(P, 0, _five_powers(base, v))
        for j in range(5, len(P), 4):
            _add_powers(P, j, _four_powers(base, v, np.float32(2.0 ** (-120.0 / (j + 4)))))


@borrowing
def _add_powers(P, j, sums):
    for i in range(min(len(sums), len(P) - j)):
        P[j + i] += sums[i]


@summing
def _five_powers(base, v):
    zero, least = np.float32(0), np.float32(2.0**-24)
    first = second = third = fourth = fifth = zero  # sums of w, ..., w^5; v becomes w^5
    for i in range(len(base)):
        first += base[i]
        w = base[i] if base[i] > least else zero
        square = w * w
        v[i] = square * w * square
        second += square
        third += square * w
        fourth += square * square
        fifth += v[i]
    return first, second, third, fourth, fifth


@summing
def _four_powers(base, v, least):
    zero = np.float32(0)
    first = second = third = fourth = zero  # sums of v w, ..., v w^4; v becomes v w^4
    for i in range(len(base)):
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
def coefficients(k):
    # memory for the coefficients c_0..c_k of a polynomial, with zeros before c_0, which first_of explains
    return np.zeros(FRONT + k + 1, np.float32)


@borrowing
def first_of(stop, count, width):
    # the index at which a loop over the last ``count`` of the coefficients c_0..c_{stop-1} begins. The loop reads
    # ``width`` coefficients at a time, so the number of coefficients is rounded up to a multiple of the width. The
    # zeros before c_0, and coefficients that are not needed, do not change results.
    return FRONT + stop - max(width, (count + width - 1) // width * width)


@borrowing
def label_gradient(w, c, scale, slope, count, scratch):
    """Replace the odds w of all classes except the label by the gradient of the loss with respect to their scores.

    The gradient is slope v (d_{k-2} (1 + v) - 1) with v = scale w, where d_j is the coefficient of X^j in
    c / (1 + v X).

    Args:
        w: odds of the classes, replaced by the gradient.
        c: coefficients c_0..c_k of the product of 1 + v X over these classes, scaled such that c_{k-1} = c_k = 1.
        scale: number by which the odds are multiplied.
        slope: derivative of the loss with respect to the label's margin.
        count: number of coefficients before c_{k-1} that are used. All others are too small to change results.
        scratch: memory for CACHE_BLOCK numbers.
    """
    k, one = len(c) - FRONT - 1, np.float32(1)
    c = c[first_of(k - 1, min(count, k - 1), 4) : FRONT + k - 1]
    first, second, third, fourth = c[0], c[1], c[2], c[3]
    for start in range(0, len(w), CACHE_BLOCK):
        v = w[start : start + CACHE_BLOCK]
        d = scratch[: len(v)]
        for i in range(len(v)):
            v[i] *= scale
            d[i] = fourth - v[i] * (third - v[i] * (second - v[i] * first))
        for j in range(4, len(c), 4):
            for i in range(len(v)):
                d[i] = c[j + 3] - v[i] * (c[j + 2] - v[i] * (c[j + 1] - v[i] * (c[j] - v[i] * d[i])))
        for i in range(len(v)):
            v[i] = slope * v[i] * (d[i] * (one + v[i]) - one)


@borrowing
def add_slopes(w, slopes, count, out, scratch):
    """Add sum_{j=1..count} slopes[j - 1] w_i^j to out_i for each class i with odds w_i.

    This part of the gradient comes from the power sums of the odds. ``scratch`` is memory for CACHE_BLOCK numbers.
    """
    for start in range(0, len(w), CACHE_BLOCK):
        v, result = w[start : start + CACHE_BLOCK], out[start : start + CACHE_BLOCK]
        sums = scratch[: len(v)]
        for i in range(len(v)):
            sums[i] = 0
        j = (count + 4) // 5 * 5 - 5  # the slopes from ``count`` on are 0
        while j >= 0:
            first, second, third, fourth, fifth = slopes[j], slopes[j + 1], slopes[j + 2], slopes[j + 3], slopes[j + 4]
            for i in range(len(v)):
                end = v[i] * (fourth + v[i] * (fifth + sums[i]))
                sums[i] = v[i] * (first + v[i] * (second + v[i] * (third + end)))
            j -= 5
        for i in range(len(v)):
            result[i] += sums[i]


@borrowing
def tail_hinges(row, w, mass, alpha, gain, c, a, powers, odds_scale, shift, scale, tau, g, dc, scratch):
    """Return the sum of the losses of the tail of a row: the classes with small odds. Also compute its gradient.

    A class with the margin m has the loss mass tau softplus((alpha - scale m) / tau). For a class of the tail with the
    odds w, m is computed from the polynomial c / (1 + odds_scale w X), by formula (9) of ../README.md. The
    polynomial c is the product of one such factor 1 + odds_scale w X per class of the row.

    Args:
        row: scores s, padded with -inf.
        w: odds of the classes of the tail, and 0 for all other classes.
        mass: mass of each class of the tail, and 0 for all other classes and for the padding.
        alpha, gain: required margin and exp(-alpha / tau) of each class.
        c: coefficients c_0..c_k as :func:`polynomial.balanced` wrote them, so c_{k-1} = c_k = 1.
        a, odds_scale, shift: a is a reference score. The others are numbers for which odds_scale w equals
            exp((s - a) / theta + shift), where theta is the temperature.
        powers: number of coefficients before c_k that are used. All others are too small to change results.
        scale, tau: 1 / k, and smoothing temperature of the loss.
        g: output, the gradient with respect to the scores as if c did not depend on the scores.
        dc: output, the gradient with respect to c_0..c_k, divided by theta.
        scratch: memory for 4 CACHE_BLOCK numbers.
    """
    # L is the loss of a class with the score s. theta is the temperature of the margin, and d_j and e_j are the
    # coefficients of X^j in d and e. The steps are:
    #     v = odds_scale w,   d = c / (1 + v X),   e = d / (1 + v X),
    #     x = d_k + gain v d_{k-1},   r = 1 / (x d_{k-1}),   chain = -mass scale r,
    #     L = mass (alpha + scale (a - s) + tau (log(x / d_{k-1}) - shift)),
    #     dL/ds = chain e_{k-1},   dL/dc_j = theta chain (-v)^(k-1-j) for j < k,   dL/dc_k = -theta chain d_{k-1}.
    n, k, value = len(w), len(dc) - 1, 0.0
    powers = min(powers, k)
    c = c[first_of(k, powers, 5) : FRONT + k]
    dc[:] = 0
    start = stop = ZERO
    while start < n:
        # with mixup, few classes have mass: groups of classes without mass are skipped
        while stop < min(n, start + CACHE_BLOCK) and largest_size(mass[stop : stop + GROUP]) != 0:
            stop = min(stop + GROUP, n)
        if stop == start:
            stop = min(stop + GROUP, n)
            fill(g[start:stop], np.float32(0))
            start = stop
            continue
        scores, v, share, out = row[start:stop], w[start:stop], mass[start:stop], g[start:stop]
        gap, factor = alpha[start:stop], gain[start:stop]
        _horner_twice(v, c, odds_scale, scratch)
        _chains(share, factor, scale, scratch, out)
        cost, of_last = _sum_of_hinges(scores, share, gap, scratch, a, shift, scale, tau)
        value += cost
        dc[k] -= of_last
        v, e = scratch[: len(v)], scratch[E : E + len(v)]
        _add_moments(e, v, powers, dc)
        start = stop
    return value


@borrowing
def _horner_twice(w, c, scale, scratch):
    # v = scale w, d_{k-1} and e_{k-2} of tail_hinges
    zero = np.float32(0)
    first, second, third, fourth, fifth = c[0], c[1], c[2], c[3], c[4]
    for i in range(len(w)):
        x = scale * w[i]
        y, z = _five_steps(x, zero, zero, first, second, third, fourth, fifth)
        scratch[i], scratch[D + i], scratch[E + i] = x, y, z
    for j in range(5, len(c), 5):
        first, second, third, fourth, fifth = c[j], c[j + 1], c[j + 2], c[j + 3], c[j + 4]
        for i in range(len(w)):
            y, z = _five_steps(scratch[i], scratch[D + i], scratch[E + i], first, second, third, fourth, fifth)
            scratch[D + i], scratch[E + i] = y, z


@inlined
def _five_steps(x, y, z, first, second, third, fourth, fifth):
    z, y = y - x * z, first - x * y
    z, y = y - x * z, second - x * y
    z, y = y - x * z, third - x * y
    z, y = y - x * z, fourth - x * y
    z, y = y - x * z, fifth - x * y
    return y, z


@borrowing
def _chains(mass, gain, scale, scratch, out):  # see tail_hinges: scratch gets chain and x / d, out gets dL/ds
    one = np.float32(1)
    for i in range(len(mass)):
        v, y = scratch[i], scratch[D + i]
        x = one - v * y * (one - gain[i])
        r = one / (x * y)
        chain = -mass[i] * scale * r
        out[i] = chain * (y - v * scratch[E + i])
        scratch[E + i], scratch[COST + i] = chain, x * x * r


@inlined
def _distance(a, score):
    return a - score  # this difference is exact, so other sums must not be merged with it


@summing
def _sum_of_hinges(scores, mass, alpha, scratch, a, shift, scale, tau):
    zero = np.float32(0)
    value = of_last = zero  # sums of L and of chain d_{k-1}
    for i in range(len(mass)):
        cost = alpha[i] + scale * _distance(a, scores[i]) + tau * (log32(scratch[COST + i]) - shift)
        value += cost * mass[i] if mass[i] != zero else zero
        of_last += scratch[E + i] * scratch[D + i]
    return value, of_last


@borrowing
def _add_moments(e, v, count, dc):
    # add the sum of e (-v)^j to dc_{k-1-j}, for j < count, where count is rounded up to a multiple of five, at most k
    k, least = len(dc) - 1, np.float32(1e-20) * largest_size(e)
    for j in range(0, count, 5):
        sums = _five_moments(e, v, least)
        for i in range(min(5, k - j)):
            dc[k - 1 - j - i] += sums[i]


@summing
def _five_moments(e, v, least):
    zero = np.float32(0)
    first = second = third = fourth = fifth = zero  # sums of e, -v e, ..., v^4 e; e becomes -v^5 e
    for i in range(len(v)):
        one, x = e[i], -v[i]
        two = x * one
        two = two if abs(two) > least else zero
        three = x * two
        four = x * three
        four = four if abs(four) > least else zero
        five = x * four
        first += one
        second += two
        third += three
        fourth += four
        fifth += five
        term = x * five
        e[i] = term if abs(term) > least else zero
    return first, second, third, fourth, fifth


@borrowing
def hinge(margin, alpha, scale, tau):
    """Return the loss tau softplus((alpha - scale margin) / tau), and its derivative with respect to the margin."""
    violation = alpha - scale * margin
    z = violation / tau
    if z < -700.0:
        return 0.0, 0.0
    e = math.exp(min(z, 40.0))
    value = violation if z > 40 else tau * math.log1p(e)
    return value, -scale * (e / (1 + e))
