"""The algorithm of torch_path on a few rows: passes over the scores row by row (rows.py), then the small polynomials of
all of them at once (polynomial.py), then the last passes. A row that holds a NaN or too few scores gives NaN."""

import math

import numpy as np

from topk_registry.ops.ksubset.numba import polynomial, rows
from topk_registry.ops.ksubset.numba.compiled import compiled


@compiled
def label_rows(s, label, k, theta, margin, gradient):
    """The margin of each row's label, and its gradient to the scores. The label's factor is left out from the start."""
    (B, n), real = s.shape, s.dtype.type
    T = min(2 * k + 1, n - 1)
    inverse, floor = rows.limits(s, theta)
    top, where = np.empty((B, T), s.dtype), np.empty((B, T), np.int64)
    room, piece, power = rows.room(n, T, s.dtype), np.empty(rows.PIECE, s.dtype), np.empty(k)
    fine, E, P, u = np.empty(B, np.bool_), np.zeros((T, B)), np.zeros((k, B)), np.empty(B)
    for r in range(B):
        g = gradient[r]
        fine[r] = 0 <= label[r] < n and rows.largest(s[r], label[r], top[r], where[r], room)
        fine[r] = fine[r] and np.isfinite(top[r, k - 1])
        if fine[r]:
            rows.odds(s[r], top[r, k - 1], inverse, floor, g)
            g[label[r]] = 0
            for j in range(T):
                g[where[r, j]] = 0
                E[j, r] = (np.float64(top[r, j]) - np.float64(top[r, k - 1])) / theta
            rows.power_sums(g, power, piece)
            P[:, r] = power
            fine[r] = not np.isnan(power[0] + s[r, label[r]])

    polynomial.exponentials(E)
    polynomial.tilt(E, P[0], k, 0, B, u)
    p, _, before, after = polynomial.top_group(E, P, u)
    in_top = np.empty((T, B))
    polynomial.label_gradient(p, before, after, in_top)

    c = np.empty(k + 1, s.dtype)
    for r in range(B):
        g = gradient[r]
        if not fine[r]:
            margin[r] = np.nan
            g[:] = np.nan
            continue
        rho = polynomial.balanced(before[T], r, c)
        rows.label_gradient(g, c, real(u[r] * rho), piece)
        for j in range(T):
            g[where[r, j]] = in_top[j, r]
        g[label[r]] = 1
        margin[r] = np.float64(s[r, label[r]]) - np.float64(top[r, k - 1]) + theta * math.log(u[r] * rho)


@compiled
def hinge_rows(margin, label, alpha, scale, tau, value, slope):
    """See :class:`topk_registry.ops.hinge.Hinge`; alpha [1] or [n]."""
    tau = max(tau, 4 * np.finfo(np.float64).tiny)
    for r in range(len(margin)):
        if np.isnan(margin[r]):  # the label may be no class
            value[r] = slope[r] = np.nan
            continue
        violation = np.float64(alpha[label[r] if len(alpha) > 1 else 0]) - scale * margin[r]
        z = violation / tau
        value[r] = violation if z > 40 else tau * math.log1p(math.exp(z))
        slope[r] = -scale / (1 + math.exp(-z))


@compiled
def margin_rows(s, k, theta, out):
    """The margins of every class, see composite.differentiable_margins. Lanes from B on hold the second tilt, with
    k + 1 for k, relative to the next class after the k-th: for the k largest classes."""
    real = s.dtype.type
    top, where, fine, _, u, gap, _, _, before, after = both_tilts(s, k, theta, out)
    B, T = top.shape
    below, last = np.empty(2 * B), np.empty(2 * B)
    in_top, c, piece = np.empty((T, 2 * B)), np.empty(k + 1, s.dtype), np.empty(rows.PIECE, s.dtype)
    for j in range(T):
        polynomial.without(before, after, j, k - 1, below)
        polynomial.without(before, after, j, k, last)
        for i in range(2 * B):
            in_top[j, i] = math.log(u[i] * below[i] / last[i])
    for r in range(B):
        if not fine[r]:
            out[r] = np.nan
            continue
        rho = polynomial.balanced(before[T], r, c)
        shift = math.log(u[r] * rho)
        a = top[r, k - 1]
        rows.tail_margins(s[r], out[r], c, real(gap[r] * u[r] * rho), a, real(theta), real(shift), piece)
        for j in range(T):
            a, lane = (top[r, k], B + r) if j < k else (top[r, k - 1], r)
            out[r, where[r, j]] = np.float64(top[r, j]) - np.float64(a) + theta * in_top[j, lane]


@compiled
def margin_rows_backward(cotangent, s, k, theta, out):
    """The vector-Jacobian product of ``margin_rows``."""
    (B, n), real = s.shape, s.dtype.type
    w = np.empty((B, n), s.dtype)
    top, where, fine, P, u, gap, p, q, before, after = both_tilts(s, k, theta, w)
    T = top.shape[1]
    g_below, g_last, g_x = np.zeros((T, 2 * B)), np.zeros((T, 2 * B)), np.zeros((T, 2 * B))
    g_product, g_c, c = np.zeros((k + 1, 2 * B)), np.empty(k + 1), np.empty(k + 1, s.dtype)
    piece, slopes = np.empty((3, rows.PIECE), s.dtype), np.empty(k, s.dtype)
    for r in range(B):
        if not fine[r]:
            continue
        g = out[r]
        g[:] = cotangent[r]
        for j in range(T):
            lane = B + r if j < k else r
            g_below[j, lane] = g[where[r, j]]
            g[where[r, j]] = 0
        rho = polynomial.balanced(before[T], r, c)
        rows.tail_cotangents(w[r], c, real(gap[r] * u[r] * rho), g, g_c, piece)
        scale = 1 / before[T, k, r]
        for j in range(k, -1, -1):
            g_product[j, r] = g_c[j] * scale
            scale /= rho
        for j in range(T):
            g[where[r, j]] = cotangent[r, where[r, j]]

    below, last = np.empty(2 * B), np.empty(2 * B)
    for j in range(T):
        polynomial.without(before, after, j, k - 1, below)
        polynomial.without(before, after, j, k, last)
        for i in range(2 * B):
            if g_below[j, i] != 0:  # the other tilt may have made it 0 / 0
                g_last[j, i] = -g_below[j, i] / last[i]
                g_below[j, i] /= below[i]
    polynomial.cotangents(q, p, before, after, g_below, g_last, g_product, g_x)
    polynomial.power_sum_cotangents(P, before[0], g_product)

    for r in range(B):
        if not fine[r]:
            out[r] = np.nan
            continue
        first, second = gap[r] * u[r], u[B + r]
        for j in range(k):  # from cotangents of tilted power sums to those of the odds' powers
            P[j, r] = (j + 1) * (P[j, r] * first + P[j, B + r] * second)
            first, second = first * gap[r] * u[r], second * u[B + r]
        least = 1e-20 * np.abs(P[:, r]).max()  # smaller ones make no difference, but could be denormal
        for j in range(k):
            slopes[j] = P[j, r] if abs(P[j, r]) > least else 0.0
        rows.add_slopes(w[r], slopes, out[r], piece[0])
        for j in range(T):
            out[r, where[r, j]] += g_x[j, r] + g_x[j, B + r]


@compiled
def both_tilts(s, k, theta, w):
    """What the margins and their gradient begin with: the tail's odds w relative to the class after the k-th, and the
    polynomials at both tilts."""
    B, n = s.shape
    T = min(2 * k + 3, n)
    inverse, floor = rows.limits(s, theta)
    top, where = np.empty((B, T), s.dtype), np.empty((B, T), np.int64)
    room, piece, power = rows.room(n, T, s.dtype), np.empty(rows.PIECE, s.dtype), np.empty(k)
    fine, gap, mass = np.empty(B, np.bool_), np.zeros(B), np.zeros(2 * B)
    E, P, u = np.zeros((T, 2 * B)), np.zeros((k, 2 * B)), np.empty(2 * B)
    for r in range(B):
        fine[r] = rows.largest(s[r], -1, top[r], where[r], room) and np.isfinite(top[r, k - 1] - top[r, k])
        if fine[r]:
            rows.odds(s[r], top[r, k], inverse, floor, w[r])
            for j in range(T):
                w[r, where[r, j]] = 0
                E[j, r] = (np.float64(top[r, j]) - np.float64(top[r, k - 1])) / theta
                E[j, B + r] = (np.float64(top[r, j]) - np.float64(top[r, k])) / theta
            rows.power_sums(w[r], power, piece)
            gap[r] = math.exp((np.float64(top[r, k]) - np.float64(top[r, k - 1])) / theta)
            mass[r], mass[B + r] = power[0] * gap[r], power[0]
            P[:, B + r] = power
            fine[r] = not np.isnan(power[0])
            factor = 1.0
            for j in range(k):
                factor *= gap[r]
                P[j, r] = power[j] * factor

    polynomial.exponentials(E)
    polynomial.tilt(E, mass, k, 0, B, u)
    polynomial.tilt(E, mass, k + 1, B, 2 * B, u)
    p, q, before, after = polynomial.top_group(E, P, u)
    return top, where, fine, P, u, gap, p, q, before, after
