"""The algorithm of torch_path on a few rows: passes over the scores row by row (rows.py), then the small polynomials of
all of them at once (polynomial.py), then the last passes. A row that holds a NaN or too few scores gives NaN."""

import math

import numpy as np

from topk_registry.ops.ksubset.numba import groups, polynomial, rows
from topk_registry.ops.ksubset.numba.compiled import borrowed, compiled
from topk_registry.ops.ksubset.numba.hinges import hinge


@compiled
def label_memory(width, n, k, dtype):
    """Memory for :func:`label_rows` to work on up to ``width`` rows at a time."""
    m = rows.padded(n)
    numbers = np.empty(m, dtype), np.empty((width, m), dtype), np.empty(rows.PIECE, dtype), rows.coefficients(k, dtype)
    of_rows = np.empty(width, np.int64), np.empty(width, dtype), np.empty(width), np.empty(width)
    group = np.empty((width, min(3 * k, m)), np.int64), np.empty((width, min(3 * k, m)))
    return groups.space(m, k, dtype), numbers, of_rows, group, np.empty(k)


@compiled
def label_rows(s, label, k, theta, margin, gradient, alpha, scale, tau, factor, value, slope, memory):
    """The margin of each row's label, and its gradient to the scores. The label's factor is left out from the start.

    With alpha [1] or [n], also a hinge on the margin and its slope; with a factor other than 0, the value and the
    gradient are those of the hinge times the factor.
    """
    (B, n), real = s.shape, s.dtype.type
    space, numbers, of_rows, group, power = memory
    space, power = groups.borrowed_space(space), borrowed(power)
    x, odds, piece, c = borrowed(numbers[0]), borrowed(numbers[1]), borrowed(numbers[2]), borrowed(numbers[3])
    size, a = borrowed(of_rows[0])[:B], borrowed(of_rows[1])
    u, most = borrowed(of_rows[2])[:B], borrowed(of_rows[3])
    where, E, P, powers = borrowed(group[0]), borrowed(group[1]), np.zeros((k, B)), 0
    for r in range(B):
        y, size[r], u[r] = label[r], -1, 1.0
        if 0 <= y < n and not np.isnan(s[r, y]):
            rows.load(s[r], x)
            x[y] = -np.inf
            size[r], a[r], u[r], most[r] = groups.split(x, k, k, groups.AT_LABEL, theta, space, odds[r], E[r], where[r])
        if size[r] >= 0:
            count = groups.power_sums(odds[r], most[r], power, piece)
            for j in range(count):
                P[j, r] = power[j]
            powers = max(powers, count)

    T = max(0, size.max())
    p, _, before, after = polynomial.top_group(E, size, u, P, powers, T)
    in_top = np.empty((T, B))
    polynomial.label_gradient(p, before, after, in_top)

    for r in range(B):
        w, rho, of_margin = odds[r], polynomial.balanced(before, T, r, c), 1.0
        margin[r] = np.nan
        if size[r] >= 0:
            margin[r] = np.float64(s[r, label[r]]) - np.float64(a[r]) + theta * math.log(u[r] * rho)
        if len(alpha) > 0:
            hinge_rows(margin[r : r + 1], label[r : r + 1], alpha, scale, tau, value[r : r + 1], slope[r : r + 1])
            if factor != 0:
                value[r] *= factor
                of_margin = np.float64(slope[r]) * factor
        if size[r] < 0:
            gradient[r] = np.nan
            continue
        count = rows.reach(most[r] * rho, k, s.itemsize)
        rows.label_gradient(w, c, real(u[r] * rho), real(of_margin), count, piece)
        for j in range(size[r]):
            w[where[r, j]] = of_margin * in_top[j, r]
        w[label[r]] = of_margin
        rows.store(w, gradient[r])


@compiled
def hinge_rows(margin, label, alpha, scale, tau, value, slope):
    """Hinges on margins [B] and their slopes; alpha [1] or [n]."""
    tau = max(tau, 4 * np.finfo(np.float64).tiny)
    for r in range(len(margin)):
        if np.isnan(margin[r]):  # the label may be no class
            value[r] = slope[r] = np.nan
        else:
            value[r], slope[r] = hinge(margin[r], np.float64(alpha[label[r] if len(alpha) > 1 else 0]), scale, tau)


@compiled
def margin_rows(s, k, theta, out):
    """The margins of every class. Lanes from B on hold the second tilt, with k + 1 for k: for the k largest classes."""
    (B, n), real = s.shape, s.dtype.type
    w = np.empty((B, rows.padded(n)), s.dtype)
    size, where, kth, a, u, gap, most, _, _, _, before, after = both_tilts(s, k, theta, w)
    T = len(before) - 1
    below, last = leave_one_out(before, after)
    c, piece = rows.coefficients(k, s.dtype), np.empty(rows.PIECE, s.dtype)
    for r in range(B):
        if size[r] < 0:
            out[r] = np.nan
            continue
        rho = polynomial.balanced(before, T, r, c)
        shift, tilt = math.log(u[r] * rho), gap[r] * u[r] * rho
        count = 1 + rows.reach(most[r] * rho, k, s.itemsize)
        rows.tail_margins(s[r], w[r], out[r], c, real(tilt), kth[r], real(theta), real(shift), count, piece)
        for j in range(size[r]):
            reference, lane = (a[r], B + r) if j < k else (kth[r], r)
            i = where[r, j]
            log_odds = math.log(u[lane] * below[j, lane] / last[j, lane])
            out[r, i] = np.float64(s[r, i]) - np.float64(reference) + theta * log_odds


@compiled
def margin_rows_backward(cotangent, s, k, theta, out):
    """The vector-Jacobian product of ``margin_rows``."""
    (B, n), real = s.shape, s.dtype.type
    w = np.empty((B, rows.padded(n)), s.dtype)
    size, where, _, _, u, gap, most, P, p, q, before, after = both_tilts(s, k, theta, w)
    T = len(before) - 1
    g_below, g_product = np.zeros((T, 2 * B)), np.zeros((k + 1, 2 * B))
    g_c, c, piece = np.empty(k + 1), rows.coefficients(k, s.dtype), np.empty((3, rows.PIECE), s.dtype)
    for r in range(B):
        if size[r] < 0:
            continue
        g = out[r]
        g[:] = cotangent[r]
        for j in range(size[r]):
            g_below[j, B + r if j < k else r] = g[where[r, j]]
            g[where[r, j]] = 0
        rho = polynomial.balanced(before, T, r, c)
        left_out = max(0, k - 1 - rows.reach(most[r] * rho, k, s.itemsize))
        g_c[:left_out] = 0
        rows.tail_cotangents(w[r, :n], c[rows.FRONT + left_out :], real(gap[r] * u[r] * rho), g, g_c[left_out:], piece)
        product_cotangents(before[T], r, rho, g_c, g_product)
        for j in range(size[r]):
            g[where[r, j]] = cotangent[r, where[r, j]]
    below, last = leave_one_out(before, after)
    finish_gradient(s, w, size, where, u, gap, most, P, p, q, before, after, below, last, g_below, g_product, out)


@compiled
def leave_one_out(before, after):
    """Coefficients k - 1 and k of the product without each factor: [T, lanes] both."""
    T, k, lanes = len(before) - 1, before.shape[1] - 1, before.shape[2]
    below, last = np.empty((T, lanes)), np.empty((T, lanes))
    for j in range(T):
        polynomial.without(before, after, j, k - 1, below[j])
        polynomial.without(before, after, j, k, last[j])
    return below, last


@compiled
def product_cotangents(product, lane, rho, g_c, g_product):
    """From cotangents of balanced coefficients to those of the product's own."""
    scale, back = 1 / product[len(g_c) - 1, lane], 1 / rho
    for j in range(len(g_c) - 1, -1, -1):
        g_product[j, lane] = g_c[j] * scale
        scale *= back


@compiled
def finish_gradient(s, w, size, where, u, gap, most, P, p, q, before, after, below, last, g_below, g_product, out):
    """Add to the direct gradients in ``out`` what passes through the polynomials: from cotangents of the log-odds of
    the top group, ``g_below``, and of the whole product."""
    (B, n), k, T = s.shape, len(P), len(p)
    g_x, g_last = np.zeros((T, 2 * B)), np.zeros((T, 2 * B))
    piece, slopes = np.empty(rows.PIECE, s.dtype), np.empty(k, s.dtype)
    for j in range(T):
        for i in range(2 * B):
            if g_below[j, i] != 0:  # the other tilt may have made it 0 / 0
                g_last[j, i] = -g_below[j, i] / last[j, i]
                g_below[j, i] /= below[j, i]
    polynomial.cotangents(q, p, before, after, g_below, g_last, g_product, g_x)
    polynomial.power_sum_cotangents(P, before[0], g_product)

    for r in range(B):
        if size[r] < 0:
            out[r] = np.nan
            continue
        first, second = gap[r] * u[r], u[B + r]
        for j in range(k):  # from cotangents of tilted power sums to those of the odds' powers
            P[j, r] = (j + 1) * (P[j, r] * first + P[j, B + r] * second)
            first, second = first * gap[r] * u[r], second * u[B + r]
        least = 1e-20 * np.abs(P[:, r]).max()  # smaller ones make no difference, but could be denormal
        for j in range(k):
            slopes[j] = P[j, r] if abs(P[j, r]) > least else 0.0
        count = rows.reach(most[r] / (1 - most[r]), k, s.itemsize)
        rows.add_slopes(w[r, :n], slopes[:count], out[r], piece)
        for j in range(size[r]):
            out[r, where[r, j]] += g_x[j, r] + g_x[j, B + r]


@compiled
def both_tilts(s, k, theta, w):
    """First part of margins and their gradient: the tail's odds w relative to the class after the k-th, and the
    polynomials at both tilts. ``most``: the largest of the tail's odds, tilted."""
    (B, n), m = s.shape, w.shape[1]
    space, piece, power = groups.space(m, k + 1, s.dtype), np.empty(rows.PIECE, s.dtype), np.empty(k)
    x = np.empty(m, s.dtype)
    size, kth, a, most = np.empty(2 * B, np.int64), np.empty(B, s.dtype), np.empty(B, s.dtype), np.zeros(B)
    where, gap, u = np.empty((B, min(5 * k + 5, n)), np.int64), np.ones(B), np.ones(2 * B)
    E, P, powers = np.empty((2 * B, where.shape[1])), np.zeros((k, 2 * B)), 0
    for r in range(B):
        rows.load(s[r], x)
        size[r], a[r], u[B + r], most[r] = groups.split(
            x, k, k + 1, groups.AT_ALL, theta, space, w[r], E[B + r], where[r]
        )
        size[B + r], kth[r] = size[r], a[r]
        if size[r] < 0:
            u[B + r] = 1.0
            continue
        powers = max(powers, groups.power_sums(w[r], most[r], power, piece))
        u[r] = u[B + r]
        if size[r] > 0:  # else no class needs a second tilt
            kth[r] = space[0][k - 1]
            gap[r] = math.exp((np.float64(a[r]) - np.float64(kth[r])) / theta)
            for j in range(size[r]):
                E[r, j] = groups.odds_of(s[r, where[r, j]], kth[r], theta)
            u[r] = groups.balance(E[r, : size[r]], power[0] * gap[r], k)
        factor = 1.0
        for j in range(k):
            factor *= gap[r]
            P[j, r], P[j, B + r] = power[j] * factor, power[j]
    p, q, before, after = polynomial.top_group(E, size, u, P, powers, max(0, size.max()))
    return size, where, kth, a, u, gap, most, P, p, q, before, after
