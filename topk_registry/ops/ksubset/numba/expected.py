"""The hinges of a few rows on targets of every kind, with their gradient."""
# pyright: reportCallIssue=false, reportArgumentType=false

import math
from collections import namedtuple

import numpy as np

from topk_registry.ops.cpu import blocks
from topk_registry.ops.cpu.numbers import borrowed, compiled
from topk_registry.ops.ksubset.numba import kernels, large_hinges, narrow, polynomial, rows
from topk_registry.ops.ksubset.numba.hinges import hinge, tail_hinges
from topk_registry.ops.ksubset.numba.targets import FEW, gaps_and_gains, holds, mass_among, masses, one_hinge

# Memory for hinges: that for all classes; masses, scores x, the direct gradient of each row, cotangents of the
# coefficients; and gaps and gains of the classes, or PIECE equal ones.
HingeMemory = namedtuple("HingeMemory", "both mass x direct g_c alphas gains")


@compiled
def hinge_memory(width, n, k, dtype, alpha, gain):
    """Memory for :func:`hinge_rows` to work on up to ``width`` rows at a time, gaps and gains included."""
    m = blocks.padded(n)
    alphas, gains = gaps_and_gains(n, alpha, gain, dtype)
    return HingeMemory(
        kernels.both_memory(width, n, k, dtype), np.zeros(m, dtype), np.empty(m, dtype), np.empty((width, m), dtype),
        np.empty(k + 1), alphas, gains,
    )  # fmt: skip


@compiled
def narrow_memory(width, n, k, dtype, alpha, gain):
    """Memory for :func:`narrow_hinge_rows`, which works on a row at a time."""
    others = large_hinges.hinge_memory(n, k, dtype, alpha, gain)
    return narrow.Memory(others, narrow.expand(n, 0, k, others.x.itemsize), np.zeros((10, narrow.MOST + 1)))


@compiled
def narrow_hinge_rows(
    s, brain, q, labels, shares, uniform, weight, alpha, factor, k, theta, scale, tau, value, out, memory
):  # fmt: skip
    """:func:`hinge_rows` for large k: a row is narrow, or its classes are left out by division."""
    for r in range(len(s)):
        at = slice(r, r + 1)
        if not narrow_hinge_row(
            s[r], brain, q[at], labels[at], shares[at], uniform[at], weight, alpha, factor, k, theta, scale, tau,
            value[at], out[r], memory,
        ):  # fmt: skip
            large_hinges.hinge_row(
                s[r], brain, q[at], labels[at], shares[at], uniform[at], weight, alpha, factor, k, theta, scale, tau,
                value[at], out[r], memory.of_others,
            )  # fmt: skip


@compiled
def narrow_hinge_row(
    s, brain, q, labels, shares, uniform, weight, alpha, factor, k, theta, scale, tau, value, out, memory
):  # fmt: skip
    """One row of :func:`hinge_rows`, all else as there; False, and nothing written, where the row is not narrow."""
    others, expansion, terms = memory.of_others, memory.expansion, borrowed(memory.terms)
    n, real, mass, x = len(out), others.mass.dtype.type, borrowed(others.mass), borrowed(others.x)
    d, g, pieces = borrowed(others.odds), borrowed(others.direct), borrowed(others.pieces)
    blocks.load(s[:n], brain, x)
    size, a, u = narrow.centred(x, n, theta, expansion, d, terms[0], terms[1])
    if size == 0:
        return False
    few, few_mass = np.empty(FEW, np.int64), np.empty(FEW)
    tau = max(tau, 4 * np.finfo(np.float64).tiny)
    a_m, inverse, ratio, of_ratio = terms[1, : size + 1], terms[3, : size + 1], terms[4], terms[5]
    ratio[:] = 0
    of_equal = narrow.ratio_polynomial(a_m, n, k, expansion, terms[2, : size + 1], inverse, ratio[: size + 1])
    shift, total = math.log(u * of_equal), 0.0
    count = masses(0, q, labels, shares, uniform, weight, factor, mass[:n], few, few_mass)
    if count < 0:
        total = narrow.hinges(
            x, d, mass, others.alphas, others.gains, a, size, expansion, of_equal, shift, scale, tau, ratio, of_ratio,
            g, pieces,
        )  # fmt: skip
    else:
        blocks.fill(g, real(0))
        of_ratio[:] = 0
        for f in range(count):
            i = few[f]
            if few_mass[f] != 0:
                v = np.float64(d[i])
                gap = np.float64(alpha[i if len(alpha) > 1 else 0])
                cost, own, through = narrow.hinge_of_class(
                    np.float64(x[i]), np.float64(a), v, few_mass[f], gap, shift, theta, scale, tau,
                    ratio[: size + 1], of_ratio,
                )  # fmt: skip
                total += cost
                g[i] += real(own + (expansion.p + v) * (1 - expansion.p - v) * through)
    narrow.ratio_slopes(a_m, expansion, inverse, ratio, of_ratio, terms[6:9], terms[9])
    narrow.add_slopes(d, expansion.p, terms[9], g)
    blocks.store(g, brain, out)
    value[0] = total
    return True


@compiled
def hinge_rows(s, brain, q, labels, shares, uniform, weight, alpha, factor, k, theta, scale, tau, value, out, memory):
    """value <- factor sum_c q_c w_c L_c, out <- its gradient; see :mod:`topk_registry.ops.ksubset.soft_targets`.

    The target is q [B, n], or labels and shares [B, m] with uniform [B] or [0]; the other is empty. weight is [n] or
    [0], alpha is [n] or [1].
    """
    (B, n), real = out.shape, memory.mass.dtype.type
    size, where, kth, a, u, gap, most, P, p, q_top, before, after = kernels.both_tilts(
        s, brain, n, k, theta, memory.both
    )
    odds, pieces, c = borrowed(memory.both.odds), borrowed(memory.both.pieces), borrowed(memory.both.c)
    alphas, gains, mass = borrowed(memory.alphas), borrowed(memory.gains), borrowed(memory.mass)
    x, direct, g_c = borrowed(memory.x), borrowed(memory.direct), borrowed(memory.g_c)
    T = len(before) - 1
    g_below, g_product = np.zeros((T, 2 * B)), np.zeros((k + 1, 2 * B))
    below, last = kernels.leave_one_out(before, after)
    few, few_mass = np.empty(FEW, np.int64), np.empty(FEW)
    tau = max(tau, 4 * np.finfo(np.float64).tiny)
    for r in range(B):
        value[r] = np.nan
        if size[r] < 0:
            continue
        blocks.load(s[r, :n], brain, x)
        count = masses(r, q, labels, shares, uniform, weight, factor, mass[:n], few, few_mass)
        g, total = direct[r], 0.0
        for j in range(size[r]):
            i = where[r, j]
            m = np.float64(mass[i]) if count < 0 else mass_among(i, few[:count], few_mass)
            if count < 0:
                mass[i] = 0
            if m != 0:
                reference, lane = (a[r], B + r) if j < k else (kth[r], r)
                margin = np.float64(x[i]) - np.float64(reference)
                margin += theta * math.log(u[lane] * below[j, lane] / last[j, lane])
                cost, slope = hinge(margin, np.float64(alpha[i if len(alpha) > 1 else 0]), scale, tau)
                total += m * cost
                g_below[j, lane] = m * slope
        rho = polynomial.balanced(before, T, r, c)
        tilt, shift = gap[r] * u[r] * rho, math.log(u[r] * rho)
        if count < 0:
            powers = 1 + rows.reach(most[r] * rho, k, x.itemsize)
            total += tail_hinges(
                x, odds[r], mass, alphas, gains, kth[r], c, powers, tilt, shift, scale, tau, g, g_c, pieces
            )
        else:
            blocks.fill(g, real(0))
            g_c[:] = 0
            for f in range(count):
                i = few[f]
                if few_mass[f] != 0 and not holds(where[r, : size[r]], i):
                    distance, v = np.float64(x[i]) - np.float64(kth[r]), np.float64(odds[r, i]) * tilt
                    gap_of = np.float64(alpha[i if len(alpha) > 1 else 0])
                    cost, slope = one_hinge(
                        distance, gap_of, few_mass[f], v, c[blocks.FRONT :], shift, theta, scale, tau, g_c
                    )
                    total += few_mass[f] * cost
                    g[i] += real(slope)
        for j in range(size[r]):
            g[where[r, j]] = real(g_below[j, B + r] + g_below[j, r])
        kernels.product_cotangents(before[T], r, rho, g_c, g_product)
        value[r] = total
    kernels.top_cotangents(size, u, gap, P, p, q_top, before, after, below, last, g_below, g_product)
    for r in range(B):
        if size[r] < 0:
            blocks.fill(direct[r], real(np.nan))
        else:
            kernels.add_slopes(r, size[r], where, odds[r], most[r], P, g_below, direct[r], pieces)
        blocks.store(direct[r], brain, out[r])
