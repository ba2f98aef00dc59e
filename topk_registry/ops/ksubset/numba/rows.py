"""Passes over the scores of one row. Those over many numbers work in pieces that stay in the first-level cache, and
take several steps of a recurrence at a time, for it is loads and stores that they spend their time on."""

import math

import numpy as np

from topk_registry.ops.ksubset.numba.compiled import compiled, exp32, exp64, log32, log64, summing

PIECE = 512  # scores to work on at a time


@compiled
def lines_of_search(n, T):
    """How many lines of every so many scores :func:`largest` takes maxima over: about sqrt(n T), so that those, and
    the lines with scores of interest, are few; 0 where there are too few scores for it to pay."""
    lines = 32
    while lines < 2 * (T + 1) or (lines * lines < n * T and 4 * lines <= n):
        lines *= 2
    return lines if 2 * lines <= n else 0


@compiled
def room(n, T, dtype):
    """What :func:`largest` works with."""
    return np.empty(lines_of_search(n, T), dtype), np.empty(n, np.int64), np.empty(n + 16, dtype)


@compiled
def largest(row, skip, top, where, space):
    """The T largest scores, largest first, and their classes, the class ``skip`` left out; False if there are fewer.

    Most scores are looked at once: the maxima over every len(maxima)-th score tell which of those lines hold scores as
    large as a bound that T others reach. There are no branches on single scores, for they could not be foretold.
    """
    maxima, found, scores = space
    n, T, lines, candidates = len(row), len(top), len(maxima), 0
    least = top.dtype.type(-np.inf)
    if lines == 0:
        for i in range(n):
            found[candidates] = i
            candidates += (row[i] >= least) & (i != skip)
    else:
        least, of_interest = _lower_bound(row, maxima, scores, T), 0
        for line in range(lines):
            found[n - 1 - of_interest] = line
            of_interest += maxima[line] >= least
        for j in range(of_interest):
            i = found[n - 1 - j]
            while i < n:
                found[candidates] = i
                candidates += (row[i] >= least) & (i != skip)
                i += lines
    if candidates < T:
        return False
    for j in range(candidates):
        scores[j] = row[found[j]]
    if candidates <= 256:
        _place(scores, found, candidates, top, where)
    else:
        order = np.argsort(-scores[:candidates])
        for j in range(T):
            top[j], where[j] = scores[order[j]], found[order[j]]
    return True


@compiled
def _place(scores, found, candidates, top, where):
    """Each score where the number of larger ones says, equal ones after each other."""
    T = len(top)
    where[:] = -1
    padded = scores[: (candidates + 15) // 16 * 16]
    padded[candidates:] = -np.inf
    for j in range(candidates):
        place = _number_larger(padded, padded[j])
        while place < T and where[place] >= 0:
            place += 1
        if place < T:
            top[place], where[place] = padded[j], found[j]


@compiled
def _number_larger(scores, v):
    count = np.int32(0)
    for i in range(len(scores)):
        count += np.int32(scores[i] > v)
    return count


@compiled
def _lower_bound(row, maxima, folded, T):
    """A score that T + 1 others reach, so T whichever is left out: the one after the T largest of the lines' maxima, of
    which several are taken together first: twice as many as that tell nearly as much as all."""
    n, lines = len(row), len(maxima)
    maxima[:] = row[:lines]
    for start in range(lines, n - lines + 1, lines):
        stripe = row[start : start + lines]
        for j in range(lines):
            maxima[j] = stripe[j] if stripe[j] > maxima[j] else maxima[j]
    rest = row[n - n % lines :]
    for j in range(len(rest)):
        maxima[j] = rest[j] if rest[j] > maxima[j] else maxima[j]
    few = lines
    while few // 2 >= 2 * (T + 1):
        few //= 2
    folded = folded[:few]
    folded[:] = maxima[:few]
    for start in range(few, lines, few):
        for j in range(few):
            folded[j] = max(folded[j], maxima[start + j])
    least = row.dtype.type(np.inf)
    for v in folded:
        if v < least and _number_larger(folded, v) <= T:
            least = v
    return least


@compiled
def limits(s, theta):
    """What :func:`odds` takes beside the scores: 1 / theta, and the exponent from which on odds are 0."""
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
def label_gradient(w, c, scale, piece):
    """w <- v (d_{k-2} (1 + v) - 1), v = scale w, d = c / (1 + v X), c_{k-1} = c_k = 1."""
    c, one = in_fours(c[: max(1, len(c) - 2)] if len(c) > 2 else np.zeros_like(c[:1])), w.dtype.type(1)
    for start in range(0, len(w), PIECE):
        v = w[start : start + PIECE]
        d = piece[: len(v)]
        for i in range(len(v)):
            v[i] *= scale
        horner(v, c, d)
        for i in range(len(v)):
            v[i] = v[i] * (d[i] * (one + v[i]) - one)


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
    least = w.dtype.type(1e-20) * np.abs(g).max()
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
    """out += sum_j slopes[j - 1] w^j: what the power sums' cotangents come to."""
    k = len(slopes)
    for start in range(0, len(w), PIECE):
        odds, result = w[start : start + PIECE], out[start : start + PIECE]
        total = piece[: len(odds)]
        for i in range(len(odds)):
            total[i] = slopes[k - 1]
        for j in range(k - 2, -1, -1):
            for i in range(len(odds)):
                total[i] = total[i] * odds[i] + slopes[j]
        for i in range(len(odds)):
            result[i] += total[i] * odds[i]
