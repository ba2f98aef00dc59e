"""The hinges of many classes of a row at once, for targets that are distributions."""
# pyright: reportCallIssue=false, reportArgumentType=false

import math

from topk_registry.ops.ksubset.numba.compiled import compiled, log32, log64, summing
from topk_registry.ops.ksubset.numba.rows import FRONT, PIECE, in_fours, largest_size, total


@compiled
def hinge(margin, alpha, scale, tau):
    """The hinge of a margin and its slope; see :class:`topk_registry.ops.hinge.Hinge`."""
    violation = alpha - scale * margin
    z = violation / tau
    value = violation if z > 40 else tau * math.log1p(math.exp(z))
    return value, -scale / (1 + math.exp(-z))


@compiled
def tail_hinges(row, w, mass, alpha, gain, a, c, odds_scale, shift, scale, tau, g, dc, pieces):
    """The sum of the tail's hinges, weighted by ``mass``; g <- its direct gradient, dc <- its cotangents of c.

    The hinge of a class is tau log(1 + exp(alpha / tau) / odds). With d = c / (1 + v X), v = odds_scale w, e = d /
    (1 + v X), x = d_k + gain v d_{k-1}, gain = exp(-alpha / tau), and r = 1 / (x d_{k-1}), one division and one
    logarithm make

        L = alpha + scale (a - s) + tau (log(x / d_{k-1}) - shift),   chain = -mass scale r,
        dL/ds = chain e_{k-1},   dL/dc_j = chain (-v)^(k-1-j),   dL/dc_k = -chain d_{k-1}.

    ``alpha`` and ``gain`` hold one number a class, or PIECE equal ones.
    """
    n, k, real = len(w), len(dc) - 1, w.dtype.type
    c, per_class, value = in_fours(c, len(c) - FRONT - 1, k), len(alpha) > PIECE or len(alpha) == n, 0.0
    odds_scale, shift, scale, tau = real(odds_scale), real(shift), real(scale), real(tau)
    dc[:] = 0
    for start in range(0, n, PIECE):
        stop = min(start + PIECE, n)
        at = start if per_class else 0
        v, d, e, cost = (
            pieces[0, : stop - start],
            pieces[1, : stop - start],
            pieces[2, : stop - start],
            pieces[3, : stop - start],
        )
        for i in range(len(v)):
            v[i] = w[start + i] * odds_scale
            d[i] = e[i] = real(0)
        _horner_twice(v, c, d, e)
        _hinges(
            row[start:stop], mass[start:stop], alpha[at : at + len(v)], gain[at : at + len(v)],
            v, d, e, a, shift, scale, tau, g[start:stop], cost,
        )  # fmt: skip
        value += total(cost)
        dc[k] -= _dot(e, d)
        least = real(1e-20) * largest_size(e)
        for j in range(k - 1, -1, -3):
            first, second, third = _moments(e, v, least)
            dc[j] += first
            dc[max(0, j - 1)] += second if j >= 1 else 0.0
            dc[max(0, j - 2)] += third if j >= 2 else 0.0
    return value


@compiled
def _horner_twice(v, c, d, e):
    """From zeros d <- d_{k-1} and e <- e_{k-2}, the last coefficients of c / (1 + v X) and of c / (1 + v X)^2."""
    for j in range(0, len(c), 4):
        for i in range(len(v)):
            x, y, z = v[i], d[i], e[i]
            z = y - x * z
            y = c[j] - x * y
            z = y - x * z
            y = c[j + 1] - x * y
            z = y - x * z
            y = c[j + 2] - x * y
            z = y - x * z
            y = c[j + 3] - x * y
            d[i], e[i] = y, z


@compiled
def _hinges(scores, mass, alpha, gain, v, d, e, a, shift, scale, tau, out, cost):
    """e <- chain, out <- dL/ds, cost <- mass L."""
    one, zero = v.dtype.type(1), v.dtype.type(0)
    for i in range(len(v)):
        x = one - v[i] * d[i] * (one - gain[i])
        r = one / (x * d[i])
        chain = -mass[i] * scale * r
        out[i] = chain * (d[i] - v[i] * e[i])
        e[i] = chain
        cost[i] = x * x * r
    if v.itemsize == 4:
        for i in range(len(v)):
            value = alpha[i] + scale * (a - scores[i]) + tau * (log32(cost[i]) - shift)
            cost[i] = value * mass[i] if mass[i] != zero else zero
    else:
        for i in range(len(v)):
            value = alpha[i] + scale * (a - scores[i]) + tau * (log64(cost[i]) - shift)
            cost[i] = value * mass[i] if mass[i] != zero else zero


@summing
def _dot(a, b):
    sum = a.dtype.type(0)
    for i in range(len(a)):
        sum += a[i] * b[i]
    return sum


@summing
def _moments(e, v, least):
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
