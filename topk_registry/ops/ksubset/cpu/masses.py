"""Smooth top-k losses and gradients on the CPU, for targets with several classes, compiled by numba.

The mass of a class is the weight of this class in the target of a row.
"""
# pyright: reportCallIssue=false, reportArgumentType=false

import math
from collections import namedtuple

import numpy as np

from topk_registry.ops.cpu import blocks
from topk_registry.ops.cpu.masks import places_unequal
from topk_registry.ops.cpu.memory import borrowed, empty, zeros
from topk_registry.ops.cpu.numbers import ZERO, compiled, copy, largest_integer
from topk_registry.ops.ksubset.cpu import loops, polynomial
from topk_registry.ops.ksubset.cpu.split import CERTAIN, INVALID, balance, power_sums, scratch_space, split, to_odds

ZERO_32 = np.float32(0)
FEW_CLASSES = 8  # if at most this many classes have mass, only the losses of these classes are computed
LIMIT = 1 / 4  # classes with larger odds belong to the top group
NO_MASS = -3  # stored in place of the size of the top group if a row has no mass

# Scratch memory of a thread. One row at a time uses space (for split), mass (of each class), scratch (four blocks), c
# and g_c (coefficients and their gradient), powers and slopes. These fields have an entry per row: x (scores), odds,
# direct (gradient at fixed coefficients), where and members (classes and odds of the top group). alphas and gains hold
# alpha and exp(-alpha / tau) of each class. If alpha is one number, both have CACHE_BLOCK equal numbers.
Memory = namedtuple("Memory", "space x odds direct mass scratch c g_c where members powers slopes alphas gains")
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
    length = m if len(alpha) > 1 else blocks.CACHE_BLOCK
    alphas, gains = zeros(length, np.float32), zeros(length, np.float32)
    gap, gain = np.float32(0), 0.0
    for i in range(n if len(alpha) > 1 else length):
        if i == 0 or len(alpha) > 1:
            gap = np.float32(alpha[i])
            gain = math.exp(-np.float64(gap) / tau)
        alphas[i], gains[i] = gap, gain
    return Memory(
        scratch_space(m, k + 1), empty((width, m), np.float32), empty((width, m), np.float32),
        empty((width, m), np.float32), zeros(m, np.float32), empty(4 * blocks.CACHE_BLOCK, np.float32),
        loops.coefficients(k), empty(k + 1), empty((width, members), np.int64), empty((2 * width, members)), empty(k),
        zeros(k + 8, np.float32), alphas, gains,
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
    few, few_mass = empty(FEW_CLASSES + 1, np.int64), empty(FEW_CLASSES)
    tilts = _both_tilts(s, n, labels, shares, even, dense, k, theta, few, memory)
    size, T = tilts.size, tilts.T
    below, last = _leave_one_out(tilts.before, tilts.after)
    g_below, g_product = zeros((T, 2 * B)), zeros((k + 1, 2 * B))
    for r in range(B):
        x, g = memory.x[r], memory.direct[r]
        if size[r] < 0:
            value[r] = 0.0 if size[r] == NO_MASS else np.nan
            if size[r] == CERTAIN:
                count = _masses(r, labels, shares, even, dense, memory.mass[:n], few, few_mass)
                value[r] = _loss_of_certain(x, count, memory.mass[:n], few, few_mass)
            continue
        count = _masses(r, labels, shares, even, dense, memory.mass[:n], few, few_mass)
        total = 0.0
        for j in range(size[r]):  # the top group
            i = memory.where[r, j]
            mass = np.float64(memory.mass[i]) if count < 0 else _mass_among(i, few[:count], few_mass)
            memory.mass[i] = 0
            if mass != 0:
                lane = B + r if j < k else r
                margin = np.float64(x[i]) - np.float64(tilts.a[r] if j < k else tilts.kth[r])
                margin += theta * math.log(tilts.u[lane] * below[j, lane] / last[j, lane])
                cost, slope = loops.hinge(margin, np.float64(alpha[i if len(alpha) > 1 else 0]), scale, tau)
                total += mass * cost
                g_below[j, lane] = mass * slope
        rho = polynomial.balanced(tilts.before, T, r, memory.c)
        tilt = tilts.ratio[r] * rho
        shift = math.log(tilts.u[r] * rho)
        if count < 0:
            powers = 1 + loops.reach(tilts.most[r] * rho, k)
            total += loops.tail_hinges(
                x, memory.odds[r], memory.mass, memory.alphas, memory.gains, memory.c, tilts.kth[r], powers,
                np.float32(tilt), np.float32(shift), np.float32(scale), np.float32(tau), g, memory.g_c, memory.scratch,
            )  # fmt: skip
        else:
            blocks.fill(g, np.float32(0))
            memory.g_c[:] = 0
            for f in range(count):
                i = few[f]
                if few_mass[f] != 0 and not _contains(memory.where[r, : size[r]], i):
                    distance, v = np.float64(x[i]) - np.float64(tilts.kth[r]), np.float64(memory.odds[r, i]) * tilt
                    gap = np.float64(alpha[i if len(alpha) > 1 else 0])
                    cost, slope = _one_hinge(
                        distance, gap, few_mass[f], v, memory.c[loops.FRONT :], shift, theta, scale, tau, memory.g_c
                    )
                    total += few_mass[f] * cost
                    g[i] += np.float32(slope)
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
def _both_tilts(s, n, labels, shares, even, dense, k, theta, few, memory):
    B = len(s)
    size, kth, a, most = empty(2 * B, np.int64), empty(B, np.float32), empty(B, np.float32), zeros(B)
    ratio, u, P, powers = blocks.ones(B, np.float64), blocks.ones(2 * B, np.float64), zeros((k, 2 * B)), ZERO
    where, members = memory.where, memory.members
    for r in range(B):
        x = memory.x[r]
        blocks.pad(s[r, :n], x)
        size[r] = NO_MASS
        if _out_of_range(labels[r], n):
            size[r] = INVALID
        elif _has_mass(r, shares, even, dense, few):
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
    p, q = empty((T, 2 * B)), empty((T, 2 * B))
    before, after = empty((T + 1, k + 1, 2 * B)), empty((T + 1, k + 1, 2 * B))
    polynomial.top_group(members, size, u, P, powers, p, q, before, after)
    return Tilts(size, kth, a, u, ratio, most, P, p, q, before, after, T)


@compiled
def _leave_one_out(before, after):
    T, k, lanes = len(before) - 1, before.shape[1] - 1, before.shape[2]
    below, last = empty((T, lanes)), empty((T, lanes))  # coefficients k - 1 and k of the product without factor j
    for j in range(T):
        polynomial.without(before, after, j, k - 1, below[j])
        polynomial.without(before, after, j, k, last[j])
    return below, last


@compiled
def _out_of_range(labels, n):
    for label in labels:  # noqa: SIM110  # a generator would be another function to compile
        if not 0 <= label < n:
            return True
    return False


@compiled
def _has_mass(r, shares, even, dense, few):
    if len(dense) > 0:
        return places_unequal(dense[r], ZERO_32, few[:1]) > 0
    for f in range(shares.shape[1]):
        if shares[r, f] != 0:
            return True
    return len(even) > 0 and even[r] != 0


@compiled
def _masses(r, labels, shares, even, dense, mass, few, few_mass):
    # If a list of at most FEW_CLASSES classes contains all classes with mass in row r, write the classes to ``few`` and
    # their masses to ``few_mass``, and return the length of the list. Otherwise, write the mass of every class to
    # ``mass``, and return -1.
    m = labels.shape[1]
    if len(dense) > 0:
        count = places_unequal(dense[r], ZERO_32, few)
        if count > FEW_CLASSES:
            copy(dense[r], mass)
            return -1
        for f in range(count):
            few_mass[f] = dense[r, few[f]]
        return count
    if m <= FEW_CLASSES and (len(even) == 0 or even[r] == 0):
        for f in range(m):
            few[f], few_mass[f] = labels[r, f], shares[r, f]
        return m
    blocks.fill(mass, np.float32(even[r] if len(even) > 0 else 0.0))
    for f in range(m):
        mass[labels[r, f]] += np.float32(shares[r, f])
    return -1


@compiled
def _mass_among(i, few, few_mass):
    mass = 0.0
    for f in range(len(few)):
        mass += few_mass[f] if few[f] == i else 0.0
    return mass


@compiled
def _contains(classes, i):
    for j in range(len(classes)):  # noqa: SIM110  # a generator would be another function to compile
        if classes[j] == i:
            return True
    return False


@compiled
def _loss_of_certain(x, count, mass, few, few_mass):  # the loss of a row with at most k scores above -inf
    for f in range(count):
        if few_mass[f] != 0 and x[few[f]] == -np.inf:
            return np.inf
    for i in range(len(mass) if count < 0 else 0):
        if mass[i] != 0 and x[i] == -np.inf:
            return np.inf
    return 0.0


@compiled
def _one_hinge(distance, alpha, mass, v, c, shift, theta, scale, tau, g_c):  # as loops.tail_hinges, for one class
    k, d, e = len(c) - 1, 0.0, 0.0
    for j in range(k):
        e = d - v * e
        d = np.float64(c[j]) - v * d
    last = 1.0 - v * d
    cost, slope = loops.hinge(distance + theta * (math.log(d / last) + shift), alpha, scale, tau)
    chain = mass * slope / (d * last)
    g_c[k] -= chain * d
    moment = chain
    for j in range(k - 1, -1, -1):
        g_c[j] += moment
        moment *= -v
    return cost, chain * (d - v * e)


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
    g_x, g_last = zeros((T, lanes)), zeros((T, lanes))
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
