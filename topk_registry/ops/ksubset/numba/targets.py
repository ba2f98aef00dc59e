"""The masses of a row's classes, and the hinge of one class of its tail."""
# pyright: reportCallIssue=false, reportArgumentType=false

import math

import numpy as np

from topk_registry.ops.cpu import blocks
from topk_registry.ops.cpu.memory import zeros
from topk_registry.ops.cpu.numbers import compiled
from topk_registry.ops.ksubset.numba.hinges import hinge

FEW_CLASSES = 8  # classes with mass: up to this many are visited one by one


@compiled
def gaps_and_gains(n, alpha, tau, dtype):
    """Gaps alpha and gains exp(-alpha / tau) of n classes in padded memory, or CACHE_BLOCK equal ones."""
    length = blocks.padded(n) if len(alpha) > 1 else blocks.CACHE_BLOCK
    alphas, gains = zeros(length, dtype), blocks.ones(length, dtype)
    for i in range(n if len(alpha) > 1 else length):
        gap = alpha[i if len(alpha) > 1 else 0]
        alphas[i], gains[i] = gap, math.exp(-gap / tau)
    return alphas, gains


@compiled
def masses(r, q, labels, shares, uniform, weight, factor, mass, few, few_mass):
    """The mass of each class with weight and factor: how many have any, in ``few``; or -1 and all in ``mass``."""
    n, real, count = len(mass), mass.dtype.type, 0
    if len(q) > 0:
        row, some = q[r], np.int32(0)
        for i in range(n):
            some += np.int32(row[i] != 0)
        if some <= FEW_CLASSES:
            i = 0
            while count < some:
                if row[i] != 0:
                    few[count], few_mass[count] = i, row[i] * factor
                    count += 1
                i += 1
        else:
            count = -1
            share = real(factor)
            for i in range(n):
                mass[i] = row[i] * share
    else:
        even = np.float64(uniform[r]) * factor / n if len(uniform) > 0 else 0.0
        m = labels.shape[1]
        if even == 0 and m <= FEW_CLASSES:
            for f in range(m):
                few[f], few_mass[f] = labels[r, f], shares[r, f] * factor
            count = m
        else:
            count, share = -1, real(even)
            for i in range(n):
                mass[i] = share
            for f in range(m):
                mass[labels[r, f]] += real(shares[r, f] * factor)
    if len(weight) > 0:
        for f in range(count):
            few_mass[f] *= weight[few[f]]
        if count < 0:
            for i in range(n):
                mass[i] *= weight[i]
    return count


@compiled
def mass_among(i, few, few_mass):
    mass = 0.0
    for f in range(len(few)):
        mass += few_mass[f] if few[f] == i else 0.0
    return mass


@compiled
def holds(classes, i):
    for j in range(len(classes)):  # noqa: SIM110  # a generator would be one more function to compile
        if classes[j] == i:
            return True
    return False


@compiled
def one_hinge(distance, alpha, mass, v, c, shift, theta, scale, tau, g_c):
    """The hinge of one class of the tail, and its direct gradient times ``mass``; see :func:`tail_hinges`."""
    k, d, e = len(c) - 1, 0.0, 0.0
    for j in range(k):
        e = d - v * e
        d = np.float64(c[j]) - v * d
    last = 1.0 - v * d
    cost, slope = hinge(distance + theta * (math.log(d / last) + shift), alpha, scale, tau)
    chain = mass * slope / (d * last)
    g_c[k] -= chain * d
    moment = chain
    for j in range(k - 1, -1, -1):
        g_c[j] += moment
        moment *= -v
    return cost, chain * (d - v * e)
