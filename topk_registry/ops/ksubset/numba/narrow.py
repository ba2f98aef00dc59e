"""Rows whose classes all have nearly the same odds, see "Narrow rows" in README.md.

Their polynomial is expanded about that of equal odds: a few sums of powers of p - p_0 take the place of k powers of
odds, or of products of all classes.
"""
# pyright: reportCallIssue=false, reportArgumentType=false

import math
from collections import namedtuple

import numpy as np

from topk_registry.ops.cpu import blocks
from topk_registry.ops.cpu.functions import log_of_normal
from topk_registry.ops.cpu.memory import zeros
from topk_registry.ops.cpu.numbers import compiled, summing
from topk_registry.ops.ksubset.numba.hinges import distance, hinge

FEW_TERMS, MOST_TERMS = 6, 12  # terms beyond the first
LARGEST = 4.0  # odds beyond which a row is not tried
Expansion = namedtuple("Expansion", "p limits kappa")  # see :func:`expand`


@compiled
def expand(N, left_out, k, itemsize):
    """Return p_0, the largest ratios r for FEW_TERMS and for MOST_TERMS, and kappa [4, .].

    The rows of kappa are of coefficients k - 1 and k of N factors, and of the same less ``left_out`` of N - 1 factors.
    The ratios are 0, and no row is narrow, where there are too few factors for the terms.
    """
    terms, limits, p = zeros((4, MOST_TERMS + 1)), zeros(2), 0.5
    if N > 2 * MOST_TERMS - 2:
        p = np.float64(np.float32((k - 0.5) / N))
        rounding = 2.0**-30 if itemsize == 4 else 2.0**-59
        for tier, count in enumerate((FEW_TERMS, MOST_TERMS)):
            limits[tier] = largest_ratio(N, p, count + 1, rounding)
        for j in range(2):
            krawtchouk(N, p, k - 1 + j, terms[j])
            krawtchouk(N - 1, p, k - 1 + j - left_out, terms[2 + j])
    return Expansion(p, limits, terms)


@compiled
def largest_ratio(N, p, m, rounding):
    """Return the largest ratio r for which all terms from the m-th on are below rounding, by equation 18."""
    first = (2 * math.pi * (N * p * (1 - p) + 1)) ** -0.25 / 2  # the square root of f, at least
    bound = 2 * (2 * math.pi * m) ** 0.25 * math.exp(2 * math.sqrt(m) + m * m / (4 * N)) / first
    return (rounding / bound) ** (2 / m)


@compiled
def krawtchouk(N, p, x, out):
    """Compute out[m] = [X^x] (X - 1)^m (q + p X)^(N - m) / [X^x] (q + p X)^N, by its recurrence in m."""
    q = 1 - p
    out[0], out[1] = 1.0, (x - N * p) / (N * p * q)
    for m in range(1, len(out) - 1):
        out[m + 1] = ((x - p * (N - m) - m * q) * out[m] - m * out[m - 1]) / (p * q * (N - m))


@compiled
def centred(w, mass, N, expansion, d, power, a_m):
    """Return (terms, u): the number of terms beyond the first that a row needs, 0 where it is not narrow, and the
    factor u that tilts its odds, w, of this sum.

    d <- p - p_0 of each class and 0 where the score is -inf; N other classes must remain. ``power`` <- the sums of
    their powers, a_m <- the coefficients of (17).
    """
    p, limits, real = expansion.p, expansion.limits, w.dtype.type
    power[:] = 0
    u = p / (1 - p) * N / mass
    if limits[0] == 0 or not u < LARGEST:
        return 0, 1.0
    counted = 0.0
    for start in range(0, len(w), blocks.CACHE_BLOCK):
        stop = start + blocks.CACHE_BLOCK
        sums = _centre(w[start:stop], real(u), real(p), d[start:stop])
        counted += np.float64(sums[0])
        for j in range(FEW_TERMS):
            power[j + 1] += np.float64(sums[j + 1])
    variance = N * p * (1 - p)
    ratio = max(power[2], power[1] * power[1]) / variance
    if counted != N or not ratio <= limits[1]:
        return 0, 1.0
    terms = FEW_TERMS
    if ratio > limits[0]:
        terms = MOST_TERMS
        for start in range(0, len(d), blocks.CACHE_BLOCK):
            sums = _higher_moments(d[start : start + blocks.CACHE_BLOCK])
            for j in range(FEW_TERMS):
                power[FEW_TERMS + j + 1] += np.float64(sums[j])
    a_m[0] = 1.0
    for m in range(1, terms + 1):
        total, sign = 0.0, 1.0
        for j in range(1, m + 1):
            total += sign * a_m[m - j] * power[j]
            sign = -sign
        a_m[m] = total / m
    return terms, u


@summing
def _centre(w, u, p, out):
    """out <- p_i - p; return the number of classes, and the sums of the first six powers of p_i - p."""
    zero, one = w.dtype.type(0), w.dtype.type(1)
    least = w.dtype.type(1e-6 if w.itemsize == 4 else 1e-50)  # smaller ones change nothing, but could be denormal
    count = first = second = third = fourth = fifth = sixth = zero
    for i in range(len(w)):
        v = w[i] * u
        d = v / (one + v) - p
        d = d if v > zero else zero
        count += one if v > zero else zero
        out[i] = d
        first += d
        d = d if abs(d) > least else zero
        square = d * d
        cube = square * d
        second += square
        third += cube
        fourth += square * square
        fifth += square * cube
        sixth += cube * cube
    return count, first, second, third, fourth, fifth, sixth


@summing
def _higher_moments(d):
    """Return the sums of the seventh to the twelfth power."""
    zero = d.dtype.type(0)
    least = d.dtype.type(1e-3 if d.itemsize == 4 else 1e-25)
    first = second = third = fourth = fifth = sixth = zero
    for i in range(len(d)):
        one = d[i] if abs(d[i]) > least else zero
        square = one * one
        cube = square * one
        six = cube * cube
        first += six * one
        second += six * square
        third += six * cube
        fourth += six * square * square
        fifth += six * square * cube
        sixth += six * six
    return first, second, third, fourth, fifth, sixth


@compiled
def dot(a_m, terms, j):
    total = 0.0
    for m in range(len(a_m)):
        total += a_m[m] * terms[j, m]
    return total


@compiled
def label_polynomial(a_m, N, k, expansion, h):
    """Return c_{k-1} / c_k; the gradient of its logarithm to x_i is p_i sum_l h_l (p_i - p_0)^l."""
    p, terms = expansion.p, expansion.kappa
    below, last = dot(a_m, terms, 0), dot(a_m, terms, 1)
    of_below, of_last = (k - 1) / (N * p * below), k / (N * p * last)
    sign = 1.0
    for m in range(len(a_m)):
        h[m] = of_below * terms[2, m] - of_last * terms[3, m]
    for power in range(len(a_m)):
        total = 0.0
        for m in range(power, len(a_m)):
            total += a_m[m - power] * h[m]
        h[power] = sign * total
        sign = -sign
    return k * (1 - p) * below / ((N - k + 1) * p * last)


@compiled
def label_gradient(d, p, h, terms, slope, out):
    """out <- slope (p + d) sum_l h_l d^l."""
    real = d.dtype.type
    p, zeroth, first, second = real(p), real(slope * h[0]), real(slope * h[1]), real(slope * h[2])
    third, fourth, fifth, sixth = real(slope * h[3]), real(slope * h[4]), real(slope * h[5]), real(slope * h[6])
    if terms <= FEW_TERMS:
        for i in range(len(d)):
            v = d[i]
            total = third + v * (fourth + v * (fifth + v * sixth))
            out[i] = (p + v) * (zeroth + v * (first + v * (second + v * total)))
        return
    seventh, eighth, ninth = real(slope * h[7]), real(slope * h[8]), real(slope * h[9])
    tenth, eleventh, twelfth = real(slope * h[10]), real(slope * h[11]), real(slope * h[12])
    for i in range(len(d)):
        v = d[i]
        total = seventh + v * (eighth + v * (ninth + v * (tenth + v * (eleventh + v * twelfth))))
        total = third + v * (fourth + v * (fifth + v * (sixth + v * total)))
        out[i] = (p + v) * (zeroth + v * (first + v * (second + v * total)))


@compiled
def ratio_polynomial(a_m, N, k, expansion, below, inverse, ratio):
    """Return e_{k-1} / e_k where one of N equal factors is left out.

    ``ratio`` <- the series phi of (19), ``below`` <- its denominator's, and ``inverse`` <- that of 1 / denominator.
    """
    p, terms = expansion.p, expansion.kappa
    sign = 1.0
    for power in range(len(a_m)):
        of_below = of_last = 0.0
        for m in range(power, len(a_m)):
            of_below += a_m[m - power] * terms[2, m]
            of_last += a_m[m - power] * terms[3, m]
        below[power], ratio[power] = sign * of_below, sign * of_last
        sign = -sign
    first = 1 / below[0]
    for power in range(len(a_m)):
        total, unit = ratio[power], 1.0 if power == 0 else 0.0
        for m in range(1, power + 1):
            total -= below[m] * ratio[power - m]
            unit -= below[m] * inverse[power - m]
        ratio[power], inverse[power] = first * total, first * unit
    return k * (1 - p) / ((N - k) * p)


@compiled
def ratio_slopes(a_m, expansion, inverse, ratio, g, scratch, slopes):
    """From cotangents g of ``ratio`` to those of the sums of powers: ``slopes``[j] <- what d_i^j has in that of d_i."""
    terms = expansion.kappa
    of_below, of_last, of_a = scratch[0], scratch[1], scratch[2]
    for m in range(len(a_m)):
        last = 0.0
        for power in range(m, len(a_m)):
            last += g[power] * inverse[power - m]
        of_last[m] = last
    for m in range(len(a_m)):
        below = 0.0
        for power in range(m, len(a_m)):
            below -= of_last[power] * ratio[power - m]
        of_below[m] = below
    for m in range(len(a_m)):
        total, sign = 0.0, 1.0
        for power in range(len(a_m) - m):
            total += sign * (of_below[power] * terms[2, m + power] + of_last[power] * terms[3, m + power])
            sign = -sign
        of_a[m] = total
    slopes[:], sign = 0, 1.0
    for j in range(1, len(a_m)):
        total = 0.0
        for m in range(j, len(a_m)):
            total += of_a[m] * a_m[m - j]
        slopes[j - 1] = sign * total
        sign = -sign


@compiled
def hinge_of_class(x, a, d, mass, alpha, shift, theta, scale, tau, ratio, g):
    """Return the hinge of one class, its slope in the score, and its slope in the class's own d, all times the mass.

    g += the cotangents of ``ratio``. Slopes are in units of theta.
    """
    value = slope = 0.0
    for power in range(len(ratio) - 1, -1, -1):
        slope = slope * d + value
        value = value * d + ratio[power]
    cost, of_margin = hinge(x - a + theta * (shift - math.log(value)), alpha, scale, tau)
    of_ratio = -mass * of_margin / value
    moment = of_ratio
    for power in range(len(g)):
        g[power] += moment
        moment *= d
    return mass * cost, mass * of_margin, of_ratio * slope


@compiled
def hinges(x, d, mass, alpha, gain, a, terms, expansion, odds, shift, scale, tau, ratio, g, out, scratch):
    """Return the sum of the hinges of all classes, weighted by ``mass``: equation 19, with gain = exp(-alpha / tau).

    out <- its direct gradient, g <- its cotangents of ``ratio``, both in units of theta.
    ``alpha`` and ``gain`` hold one number a class, or CACHE_BLOCK equal ones.
    """
    n, real, value, p = len(d), x.dtype.type, 0.0, expansion.p
    per_class = len(alpha) > blocks.CACHE_BLOCK or len(alpha) == n
    g[:] = 0
    for start in range(0, n, blocks.CACHE_BLOCK):
        stop = min(start + blocks.CACHE_BLOCK, n)
        at = start if per_class else 0
        scores, part, share, slopes = x[start:stop], d[start:stop], mass[start:stop], out[start:stop]
        gap, factor = alpha[at : at + len(part)], gain[at : at + len(part)]
        of_ratio, cost = scratch[: len(part)], scratch[blocks.CACHE_BLOCK : blocks.CACHE_BLOCK + len(part)]
        _slopes(part, share, factor, real(p), real(1 - p), real(odds), real(scale), ratio, of_ratio, cost, slopes)
        value += _costs(scores, share, gap, cost, a, real(shift), real(scale), real(tau))
        sums = _moments_of(of_ratio, part)
        for power in range(FEW_TERMS + 1):
            g[power] += np.float64(sums[power])
        if terms > FEW_TERMS:
            sums = _higher_moments_of(of_ratio, part)
            for power in range(FEW_TERMS):
                g[FEW_TERMS + 1 + power] += np.float64(sums[power])
    return value


@compiled
def _slopes(d, mass, gain, p, q, odds, scale, ratio, of_ratio, cost, out):
    """of_ratio <- dL/dratio, cost <- ratio + gain v, out <- the direct gradient of the hinges."""
    real, one = d.dtype.type, d.dtype.type(1)
    zeroth, first, second, third = real(ratio[0]), real(ratio[1]), real(ratio[2]), real(ratio[3])
    fourth, fifth, sixth, seventh = real(ratio[4]), real(ratio[5]), real(ratio[6]), real(ratio[7])
    eighth, ninth, tenth = real(ratio[8]), real(ratio[9]), real(ratio[10])
    eleventh, twelfth = real(ratio[11]), real(ratio[12])
    for i in range(len(d)):
        v, on, off = d[i], p + d[i], q - d[i]
        value, slope = eleventh + v * twelfth, twelfth
        value, slope = tenth + v * value, value + v * slope
        value, slope = ninth + v * value, value + v * slope
        value, slope = eighth + v * value, value + v * slope
        value, slope = seventh + v * value, value + v * slope
        value, slope = sixth + v * value, value + v * slope
        value, slope = fifth + v * value, value + v * slope
        value, slope = fourth + v * value, value + v * slope
        value, slope = third + v * value, value + v * slope
        value, slope = second + v * value, value + v * slope
        value, slope = first + v * value, value + v * slope
        value, slope = zeroth + v * value, value + v * slope
        whole = value + gain[i] * odds * on / off
        chain = mass[i] * scale * (one / whole)
        of_ratio[i], cost[i] = chain, whole
        out[i] = chain * (on * off * slope - value)


@summing
def _costs(scores, mass, alpha, cost, a, shift, scale, tau):
    zero = mass.dtype.type(0)
    value = zero
    for i in range(len(mass)):
        one = alpha[i] + scale * distance(a, scores[i]) + tau * (log_of_normal(cost[i]) - shift)
        value += one * mass[i] if mass[i] != zero else zero
    return value


@summing
def _moments_of(g, d):
    """Return the sums of g d^l, l up to six."""
    zero = d.dtype.type(0)
    least = d.dtype.type(1e-5 if d.itemsize == 4 else 1e-40)
    zeroth = first = second = third = fourth = fifth = sixth = zero
    for i in range(len(d)):
        v = d[i] if abs(d[i]) > least else zero
        square = v * v
        twice, thrice = g[i] * square, g[i] * square * v
        zeroth += g[i]
        first += g[i] * d[i]
        second += twice
        third += thrice
        fourth += twice * square
        fifth += thrice * square
        sixth += thrice * (square * v)
    return zeroth, first, second, third, fourth, fifth, sixth


@summing
def _higher_moments_of(g, d):
    """Return the sums of g d^l, l from seven to twelve."""
    zero = d.dtype.type(0)
    least = d.dtype.type(1e-2 if d.itemsize == 4 else 1e-22)
    first = second = third = fourth = fifth = sixth = zero
    for i in range(len(d)):
        v = d[i] if abs(d[i]) > least else zero
        square = v * v
        cube = square * v
        six = g[i] * (cube * cube)
        first += six * v
        second += six * square
        third += six * cube
        fourth += six * (square * square)
        fifth += six * (square * cube)
        sixth += six * (cube * cube)
    return first, second, third, fourth, fifth, sixth


@compiled
def add_slopes(d, p, slopes, out):
    """out += p_i (1 - p_i) sum_j slopes[j] d_i^j: the gradient by way of the moments."""
    real = d.dtype.type
    p, q = real(p), real(1 - p)
    zeroth, first, second, third = real(slopes[0]), real(slopes[1]), real(slopes[2]), real(slopes[3])
    fourth, fifth, sixth, seventh = real(slopes[4]), real(slopes[5]), real(slopes[6]), real(slopes[7])
    eighth, ninth, tenth, eleventh = real(slopes[8]), real(slopes[9]), real(slopes[10]), real(slopes[11])
    for i in range(len(d)):
        v = d[i]
        total = eighth + v * (ninth + v * (tenth + v * eleventh))
        total = fourth + v * (fifth + v * (sixth + v * (seventh + v * total)))
        out[i] += (p + v) * (q - v) * (zeroth + v * (first + v * (second + v * (third + v * total))))
