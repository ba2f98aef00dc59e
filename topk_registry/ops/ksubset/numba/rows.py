"""Passes over the scores of one row. Those over many numbers work in pieces that stay in the first-level cache, and
take several steps of a recurrence at a time, for it is loads and stores that they spend their time on."""

import math

import numpy as np

from topk_registry.ops.ksubset.numba.compiled import compiled, exp32, exp64, log32, log64, number_at, place_of, summing

PIECE = 512  # scores to work on at a time


@compiled
def maximum(row, skip):
    """The largest score without class ``skip``; NaN where there is one whose sign is not negative."""
    best = place_of(row[1 if skip == 0 else 0])
    for part in (row[: max(skip, 0)], row[skip + 1 :]):
        for i in range(len(part)):
            best = max(best, place_of(part[i]))
    return number_at(best)


@compiled
def largest_size(x):
    """The largest absolute value; NaN where there is one."""
    best = place_of(x.dtype.type(0))
    for i in range(len(x)):
        best = max(best, place_of(abs(x[i])))
    return number_at(best)


@summing
def total(w):
    """The sum of odds."""
    sum = w.dtype.type(0)
    for i in range(len(w)):
        sum += w[i]
    return sum


@compiled
def limits(s, theta):
    """Arguments of :func:`odds` beside the scores: 1 / theta, and the exponent below which odds are 0."""
    real = s.dtype.type
    return real(1 / theta), real(0.4 * math.log(np.finfo(s.dtype).tiny))


@compiled
def odds(row, a, inverse, floor, w):
    """w = exp(min((row - a) / theta, 0)), and 0 where that is too small to change anything; NaN stays NaN."""
    if row.itemsize == 4:
        for i in range(len(row)):
            u = (row[i] - a) * inverse
            u = np.float32(0) if u > np.float32(0) else u
            u = floor if u < floor else u
            w[i] = np.float32(0) if u == floor else exp32(u)
    else:
        for i in range(len(row)):
            u = (row[i] - a) * inverse
            u = 0.0 if u > 0.0 else u
            u = floor if u < floor else u
            w[i] = 0.0 if u == floor else exp64(u)


@compiled
def reach(v, k, itemsize):
    """How many powers of odds up to v < 1 matter: the rest of a series of them is below rounding."""
    if v >= 0.95:
        return k
    bits = (34.0 if itemsize == 4 else 66.0) + math.log2(k)
    return min(k, 1 + int(bits / -math.log2(max(v, 1e-30))))


@compiled
def power_sums(w, P, piece):
    """P[j - 1] = sum_i w_i^j, j = 1..k; small odds are raised to a bound as in torch_path.power_sums, and why."""
    k, bits, span = len(P), 50.0 if w.itemsize == 4 else 120.0, 120.0 if w.itemsize == 4 else 1000.0
    P[:] = 0
    for start in range(0, len(w), PIECE):
        base = w[start : start + PIECE]
        v, reach, bound, j = piece[: len(base)], 1.0, w.dtype.type(0), 2
        P[0] += _sum_and_copy(base, v)
        while j <= k:
            least = w.dtype.type(0)
            if j > reach:
                bound, reach = w.dtype.type(2.0 ** (-bits / j)), span * j / bits
                least = w.dtype.type(np.float64(bound) ** (j - 1))
            if j + 2 <= min(k, reach):
                first, second, third = _three_powers(base, v, bound, least)
                P[j - 1] += first
                P[j] += second
                P[j + 1] += third
                j += 3
            else:
                P[j - 1] += _one_power(base, v, bound, least)
                j += 1


@summing
def _sum_and_copy(base, v):
    total = v.dtype.type(0)
    for i in range(len(v)):
        total += base[i]
        v[i] = base[i]
    return total


@summing
def _one_power(base, v, bound, least):
    total = v.dtype.type(0)
    for i in range(len(v)):
        v[i] = max(v[i], least) * max(base[i], bound)
        total += v[i]
    return total


@summing
def _three_powers(base, v, bound, least):
    first = second = third = v.dtype.type(0)
    for i in range(len(v)):
        factor = max(base[i], bound)
        one = max(v[i], least) * factor
        two = one * factor
        three = two * factor
        first += one
        second += two
        third += three
        v[i] = three
    return first, second, third


@compiled
def in_fours(c):
    """Coefficients for :func:`horner`: a multiple of four of them, zeros in front, which make no difference."""
    padded = np.zeros((len(c) + 3) // 4 * 4, c.dtype)
    padded[len(padded) - len(c) :] = c
    return padded


@compiled
def horner(v, c, d):
    """The last coefficient of c / (1 + v X), one quotient for every v; c is from :func:`in_fours`."""
    for i in range(len(v)):
        d[i] = c[3] - v[i] * (c[2] - v[i] * (c[1] - v[i] * c[0]))
    for j in range(4, len(c), 4):
        for i in range(len(v)):
            d[i] = c[j + 3] - v[i] * (c[j + 2] - v[i] * (c[j + 1] - v[i] * (c[j] - v[i] * d[i])))


@compiled
def label_gradient(w, c, scale, slope, piece):
    """w <- slope v (d_{k-2} (1 + v) - 1), v = scale w, d = c / (1 + v X), c_{k-1} = c_k = 1."""
    c, one = in_fours(c[: max(1, len(c) - 2)] if len(c) > 2 else np.zeros_like(c[:1])), w.dtype.type(1)
    for start in range(0, len(w), PIECE):
        v = w[start : start + PIECE]
        d = piece[: len(v)]
        for i in range(len(v)):
            v[i] *= scale
        horner(v, c, d)
        for i in range(len(v)):
            v[i] = slope * v[i] * (d[i] * (one + v[i]) - one)


@compiled
def tail_margins(row, w, c, scale, a, theta, shift, piece):
    """w <- (row - a) + theta (shift + log d_{k-1} - log d_k), v = scale w, d = c / (1 + v X)."""
    k = len(c) - 1
    c, last = in_fours(c[:k]), c[k]
    for start in range(0, len(w), PIECE):
        v, scores = w[start : start + PIECE], row[start : start + PIECE]
        d = piece[: len(v)]
        for i in range(len(v)):
            v[i] *= scale
        horner(v, c, d)
        if w.itemsize == 4:
            for i in range(len(v)):
                v[i] = (scores[i] - a) + theta * (log32(d[i] / (last - v[i] * d[i])) + shift)
        else:
            for i in range(len(v)):
                v[i] = (scores[i] - a) + theta * (log64(d[i] / (last - v[i] * d[i])) + shift)


@summing
def tail_cotangents(w, c, scale, g, dc, piece):
    """From the cotangents g of the log-odds: g <- g + their share in the gradient that passes through the class's own
    odds, and dc[j], what reaches the coefficients c_j. With d = c / (1 + v X), e = d / (1 + v X):

        dc_j = sum_i g_{k-1} (-v)^(k-1-j) + g_k (-v)^(k-j),   dv = -(g_{k-1} e_{k-2} + g_k e_{k-1}).

    Terms too small to matter are zero: powers of v would run into denormal numbers.
    """
    k, zero = len(c) - 1, w.dtype.type(0)
    least = w.dtype.type(1e-20) * largest_size(g)
    dc[:] = 0
    for start in range(0, len(w), PIECE):
        odds, out = w[start : start + PIECE], g[start : start + PIECE]
        v, d, e = piece[0, : len(odds)], piece[1, : len(odds)], piece[2, : len(odds)]
        for i in range(len(v)):
            v[i] = odds[i] * scale
            d[i] = c[0]
            e[i] = zero
        for j in range(1, k):
            for i in range(len(v)):
                e[i] = d[i] - v[i] * e[i]
                d[i] = c[j] - v[i] * d[i]
        total = zero
        for i in range(len(v)):
            g_last = -out[i] / (c[k] - v[i] * d[i])
            chain = out[i] / d[i] - v[i] * g_last
            out[i] -= v[i] * (chain * e[i] + g_last * d[i])
            total += g_last
            e[i] = chain
        dc[k] += total
        for j in range(k - 1, -1, -1):
            total = zero
            for i in range(len(v)):
                total += e[i]
                term = -v[i] * e[i]
                e[i] = term if abs(term) > least else zero
            dc[j] += total


@compiled
def add_slopes(w, slopes, out, piece):
    """out += sum_j slopes[j - 1] w^j: the gradient by way of the power sums' cotangents."""
    k = len(slopes)
    for start in range(0, len(w), PIECE):
        odds, result = w[start : start + PIECE], out[start : start + PIECE]
        total = piece[: len(odds)]
        total[:] = slopes[k - 1]
        for j in range(k - 2, -1, -1):
            _step(total, odds, slopes[j])
        for i in range(len(odds)):
            result[i] += total[i] * odds[i]


@compiled
def _step(total, odds, slope):
    for i in range(len(odds)):
        total[i] = total[i] * odds[i] + slope
