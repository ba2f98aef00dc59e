"""The hinges of a few rows on targets of every kind, with their gradient."""
# pyright: reportCallIssue=false, reportArgumentType=false

import math
from collections import namedtuple

import numpy as np

from topk_registry.ops.cpu import blocks
from topk_registry.ops.cpu.memory import borrowed, empty, zeros
from topk_registry.ops.cpu.numbers import compiled
from topk_registry.ops.ksubset.numba import kernels, polynomial, rows
from topk_registry.ops.ksubset.numba.hinges import LEAST_TAU, hinge, tail_hinges
from topk_registry.ops.ksubset.numba.targets import FEW_CLASSES, gaps_and_gains, holds, mass_among, masses, one_hinge

# Memory for hinges: that for all classes; masses, scores x, the direct gradient of each row, cotangents of the
# coefficients; and gaps and gains of the classes, or CACHE_BLOCK equal ones.
HingeMemory = namedtuple("HingeMemory", "both mass x direct g_c alphas gains")


@compiled
def hinge_memory(width, n, k, dtype, alpha, tau):
    """Memory for :func:`hinge_rows` to work on up to ``width`` rows at a time, gaps and gains included."""
    m = blocks.padded(n)
    alphas, gains = gaps_and_gains(n, alpha, tau, dtype)
    return HingeMemory(
        kernels.both_memory(width, n, k, dtype), zeros(m, dtype), empty(m, dtype), empty((width, m), dtype),
        empty(k + 1), alphas, gains,
    )  # fmt: skip


@compiled
def hinge_rows(
    s, is_bfloat16, q, labels, shares, uniform, weight, alpha, factor, k, theta, scale, tau, value, out, memory
):  # fmt: skip
    """value <- factor sum_c q_c w_c L_c, out <- its gradient; see :mod:`topk_registry.ops.ksubset.soft_targets`.

    The target is q [B, n], or labels and shares [B, m] with uniform [B] or [0]; the other is empty. weight is [n] or
    [0], alpha is [n] or [1].
    """
    (B, n), real = out.shape, memory.mass.dtype.type
    both, mass, x, direct, g_c, alphas, gains = borrowed(memory)
    size, where, kth, a, u, to_next, most, P, p, q_top, before, after = kernels.both_tilts(
        s, is_bfloat16, n, k, theta, both
    )
    odds, scratch, c = both.odds, both.scratch, both.c
    T = len(before) - 1
    g_below, g_product = zeros((T, 2 * B)), zeros((k + 1, 2 * B))
    below, last = kernels.leave_one_out(before, after)
    few, few_mass, tau = empty(FEW_CLASSES, np.int64), empty(FEW_CLASSES), max(tau, LEAST_TAU)
    for r in range(B):
        value[r] = np.nan
        if size[r] < 0:
            continue
        blocks.load(s[r, :n], is_bfloat16, x)
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
        tilt, shift = to_next[r] * u[r] * rho, math.log(u[r] * rho)
        if count < 0:
            powers = 1 + rows.reach(most[r] * rho, k, x.itemsize)
            total += tail_hinges(
                x, odds[r], mass, alphas, gains, kth[r], c, powers, tilt, shift, scale, tau, g, g_c, scratch
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
    kernels.top_cotangents(size, u, to_next, P, p, q_top, before, after, below, last, g_below, g_product)
    for r in range(B):
        if size[r] < 0:
            blocks.fill(direct[r], real(np.nan))
        else:
            kernels.add_slopes(r, size[r], where, odds[r], most[r], P, g_below, direct[r], scratch)
        blocks.store(direct[r], is_bfloat16, out[r])
