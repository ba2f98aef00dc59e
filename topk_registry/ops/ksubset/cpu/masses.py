"""Smooth top-k losses and gradients on the CPU, for targets with several classes, compiled by numba.

The mass of a class is the weight of this class in the target of a row.
"""
# pyright: reportCallIssue=false, reportArgumentType=false

import math
from collections import namedtuple

import numpy as np

from topk_registry.ops.cpu import blocks
from topk_registry.ops.cpu.memory import borrowed
from topk_registry.ops.cpu.numbers import ZERO, compiled, largest_integer
from topk_registry.ops.ksubset.cpu import loops, polynomial
from topk_registry.ops.ksubset.cpu.split import CERTAIN, INVALID, balance, power_sums, scratch_space, split, to_odds

LIMIT = 1 / 4  # classes with larger odds belong to the top group
NO_MASS = -3  # stored in place of the size of the top group if a row has no mass

# Scratch memory of a thread. One row at a time uses space (for split), mass (of each class), scratch (four blocks), c
# and g_c (coefficients and their gradient), powers and slopes. These fields have an entry per row: x (scores), odds,
# direct (gradient at fixed coefficients), where and members (classes and odds of the top group). alphas and gains hold
# alpha and exp(-alpha / tau) of each class.
Memory = namedtuple("Memory", "space x mass odds direct scratch c g_c where members powers slopes alphas gains")
# Polynomials of B rows at two tilts. The tilt of lanes 0..B-1 selects about k - 1/2 classes. The tilt of lanes B..2B-1
# selects about k + 1/2 classes, and is for the margins of the k largest classes. size and u [2 B] are results of split.
# kth and a [B] are the k-th and the (k + 1)-th largest score. most [B] is the largest u w in the tail in lanes B..2B-1.
# ratio [B] is u w in lanes 0..B-1, divided by u w in lanes B..2B-1. P, p, q, before and after are as in
# polynomial.top_group. T is the largest size.
Tilts = namedtuple("Tilts", "size kth a u ratio most P p q before after T")


@compiled
def memory_for(width, n, k, alpha, tau):
    """Return the scratch memory for a call of :func:`mass_rows` with at most ``width`` rows of n scores."""
    m, members = blocks.padded(n), min(5 * k + 5, blocks.padded(n))
    alphas, gains = np.zeros(m, np.float32), np.zeros(m, np.float32)
    for i in range(n):
        alphas[i] = alpha[i if len(alpha) > 1 else 0]
        gains[i] = math.exp(-np.float64(alphas[i]) / tau)
    return Memory(
        scratch_space(k + 1), np.empty((width, m), np.float32), np.zeros(m, np.float32),
        np.empty((width, m), np.float32), np.empty((width, m), np.float32),
        np.empty(4 * blocks.CACHE_BLOCK, np.float32), loops.coefficients(k), np.empty(k + 1),
        np.empty((width, members), np.int64), np.empty((2 * width, members)), np.empty(k), np.zeros(k + 8, np.float32),
        alphas, gains,
    )  # fmt: skip


@compiled
def mass_rows(s, labels, shares, even, dense, alpha, k, theta, tau, value, gradient, memory):
    """Write the losses sum_c q_c tau softplus((alpha_c - m_c / k) / tau) of rows, and the gradients of the losses.

    The mass q_c is the weight of class c in the target of a row. If ``dense`` has rows, ``dense`` gives all masses.
    Otherwise, q_c is the sum of ``even`` and the shares of the labels that equal c. The margin m_c is the score of
    class c minus the k-th largest score of the other classes, smoothed with temperature theta.

    Args:
        s: scores [B, n or more]. Columns after the first n are ignored.
        labels, shares: classes and their masses, both [B, m].
        even: mass that every class has in addition [B]. An array of length 0 stands for no additional mass.
        dense: masses of all classes [B, n] or [0, n].
        alpha: required margin of each class [n], or one number for all classes [1].
        k, theta, tau: k as in "k-th largest score"; temperature of the margins, which is k tau; smoothing temperature.
        value, gradient: output, losses [B] and their gradient with respect to the scores [B, n].
        memory: result of :func:`memory_for`.
    """
    (B, n), memory, scale = gradient.shape, borrowed(memory), 1 / k
    tilts = _both_tilts(s, n, labels, shares, even, dense, k, theta, memory)
    size, T = tilts.size, tilts.T
    below, last = _leave_one_out(tilts.before, tilts.after)
    g_below, g_product = np.zeros((T, 2 * B)), np.zeros((k + 1, 2 * B))
    for r in range(B):
        x, masses, g, total = memory.x[r], memory.mass, memory.direct[r], 0.0
        if size[r] != INVALID:
            blocks.write_masses(r, labels, shares, even, dense, masses[:n])
        if size[r] < 0:
            value[r] = np.nan if size[r] == INVALID else 0.0
            if size[r] == CERTAIN and _is_lost(x[:n], masses):
                value[r] = np.inf
            continue
        for j in range(size[r]):  # the top group
            i = memory.where[r, j]
            mass = np.float64(masses[i])
            masses[i] = 0
            if mass != 0:
                lane = B + r if j < k else r
                margin = np.float64(x[i]) - np.float64(tilts.a[r] if j < k else tilts.kth[r])
                margin += theta * math.log(tilts.u[lane] * below[j, lane] / last[j, lane])
                cost, slope = loops.hinge(margin, np.float64(alpha[i if len(alpha) > 1 else 0]), scale, tau)
                total += mass * cost
                g_below[j, lane] = mass * slope
        rho = polynomial.balanced(tilts.before, T, r, memory.c)
        tilt, shift = tilts.ratio[r] * rho, math.log(tilts.u[r] * rho)
        powers = 1 + loops.reach(tilts.most[r] * rho, k)
        total += loops.tail_hinges(
            x, memory.odds[r], masses, memory.alphas, memory.gains, memory.c, tilts.kth[r], powers,
            np.float32(tilt), np.float32(shift), np.float32(scale), np.float32(tau), g, memory.g_c, memory.scratch,
        )  # fmt: skip
        for j in range(size[r]):
            g[memory.where[r, j]] = np.float32(g_below[j, B + r] + g_below[j, r])
        _product_cotangents(tilts.before[T], r, rho, memory.g_c, g_product)
        value[r] = total
    _top_cotangents(tilts, below, last, g_below, g_product)
    for r in range(B):
        g = memory.direct[r]
        if size[r] < 0:
            blocks.fill(g, np.float32(np.nan if size[r] == INVALID else 0.0))
        else:
            _add_slopes(r, tilts, memory, g_below, g)
        for i in range(n):
            gradient[r, i] = g[i]


@compiled
def _both_tilts(s, n, labels, shares, even, dense, k, theta, memory):
    B = len(s)
    size, kth, a, most = np.empty(2 * B, np.int64), np.empty(B, np.float32), np.empty(B, np.float32), np.zeros(B)
    ratio, u, P, powers = np.ones(B), np.ones(2 * B), np.zeros((k, 2 * B)), ZERO
    where, members = memory.where, memory.members
    for r in range(B):
        x = memory.x[r]
        blocks.pad(s[r, :n], x)
        size[r] = NO_MASS
        if blocks.out_of_range(labels[r], n):
            size[r] = INVALID
        elif blocks.write_masses(r, labels, shares, even, dense, memory.mass[:n]):
            size[r], a[r], u[B + r], most[r] = split(
                x, k, k + 1, LIMIT, theta, memory.space, memory.odds[r], members[B + r], where[r]
            )
        size[B + r], kth[r] = size[r], a[r]
        if size[r] < 0:
            u[B + r] = 1.0
            continue
        count = power_sums(memory.odds[r], most[r], memory.powers, memory.scratch)
        powers = max(powers, count)
        u[r] = u[B + r]
        if size[r] > 0:  # if the top group is empty, both tilts are equal
            kth[r] = memory.space[0][k - 1]
            to_next = math.exp((np.float64(a[r]) - np.float64(kth[r])) / theta)
            for j in range(size[r]):
                members[r, j] = x[where[r, j]]
            to_odds(members[r, : size[r]], kth[r], theta)
            u[r] = balance(members[r, : size[r]], memory.powers[0] / u[B + r] * to_next, k, 0.0)
            ratio[r] = to_next * u[r] / u[B + r]
        factor = 1.0
        for j in range(count):
            factor *= ratio[r]
            P[j, r], P[j, B + r] = memory.powers[j] * factor, memory.powers[j]
    T = largest_integer(size)
    p, q = np.empty((T, 2 * B)), np.empty((T, 2 * B))
    before, after = np.empty((T + 1, k + 1, 2 * B)), np.empty((T + 1, k + 1, 2 * B))
    polynomial.top_group(members, size, u, P, powers, p, q, before, after)
    return Tilts(size, kth, a, u, ratio, most, P, p, q, before, after, T)


@compiled
def _leave_one_out(before, after):
    T, k, lanes = len(before) - 1, before.shape[1] - 1, before.shape[2]
    below, last = np.empty((T, lanes)), np.empty((T, lanes))  # coefficients k - 1 and k of the product without factor j
    for j in range(T):
        polynomial.without(before, after, j, k - 1, below[j])
        polynomial.without(before, after, j, k, last[j])
    return below, last


@compiled
def _is_lost(x, mass):  # whether a class with mass is excluded
    for i in range(len(x)):  # noqa: SIM110  # a generator would be another function to compile
        if mass[i] != 0 and x[i] == -np.inf:
            return True
    return False


@compiled
def _product_cotangents(product, lane, rho, g_c, g_product):  # the gradient of polynomial.balanced
    scale, back = 1 / product[len(g_c) - 1, lane], 1 / rho
    for j in range(len(g_c) - 1, -1, -1):
        g_product[j, lane] = g_c[j] * scale
        scale *= back


@compiled
def _top_cotangents(tilts, below, last, g_below, g_product):
    # Propagate gradients backward to the scores of the top groups and to the power sums of the tails. Gradients with
    # respect to the margins of the top group, in g_below, become gradients with respect to the scores. tilts.P[j - 1]
    # becomes j / theta times the gradient with respect to the j-th power sum of the odds of the tail.
    P, T = tilts.P, tilts.T
    k, lanes = P.shape
    B = lanes // 2
    g_x, g_last = np.zeros((T, lanes)), np.zeros((T, lanes))
    for j in range(T):
        for i in range(lanes):
            if g_below[j, i] != 0:  # in the lane of the other tilt, ``below`` and ``last`` may be 0
                g_last[j, i] = -g_below[j, i] / last[j, i]
                g_below[j, i] /= below[j, i]
    if T > 0:
        polynomial.cotangents(tilts.q, tilts.p, tilts.before, tilts.after, g_below, g_last, g_product, g_x)
    polynomial.power_sum_cotangents(P, tilts.before[0], g_product)
    for j in range(T):
        for r in range(B):
            g_below[j, r] = g_x[j, r] + g_x[j, B + r]
    for r in range(B):
        if tilts.size[r] < 0:
            continue
        factor = 1.0
        for j in range(k):
            factor *= tilts.ratio[r]
            P[j, r] = (j + 1) * (P[j, r] * factor + P[j, B + r])


@compiled
def _add_slopes(r, tilts, memory, g_top, out):
    P, most, largest = tilts.P, tilts.most[r], 0.0
    count = loops.reach(most / (1 - most), len(P))
    for j in range(len(P)):
        largest = max(largest, abs(P[j, r]))
    for j in range(len(memory.slopes)):  # tiny slopes do not change results, but could give slow denormal numbers
        memory.slopes[j] = P[j, r] if j < count and abs(P[j, r]) > 1e-20 * largest else 0.0
    loops.add_slopes(memory.odds[r], memory.slopes, count, out, memory.scratch)
    for j in range(tilts.size[r]):
        out[memory.where[r, j]] += np.float32(g_top[j, r])
