"""Splitting a row into its top group and its tail, see the operator's README.

The top group holds the classes whose odds are above a limit where k - 1/2 classes are drawn on average. A flat row,
with no softmax above limit / k, has none and is not searched: it is all tail.
"""

import math

import numpy as np

from topk_registry.ops.cpu import blocks, select
from topk_registry.ops.cpu.masks import places_above
from topk_registry.ops.cpu.numbers import NO_CLASS, borrowed, compiled
from topk_registry.ops.ksubset.numba import rows

LARGEST = 600.0  # of (s - a) / theta: odds and sums of them stay finite, and so much above makes no difference
AT_LABEL = 1 / 2  # limit of the tail's odds for the margin at a label and its gradient
AT_ALL = 1 / 4  # and for those of all classes, whose cotangents pass through the polynomials once more


@compiled
def split(row, k, depth, limit, theta, space, w, E, where):
    """(size, a, u, most): the size of the top group, the reference a of odds, the factor u = exp(-t) that tilts them,
    and the largest of the tail's tilted odds.

    E[:size] and where[:size] are the top group's odds and classes, w the odds of the tail and 0 elsewhere, all relative
    to a. Scores of -inf are classes that are left out. The tilt draws depth - 1/2 classes, depth = k or, for a second
    tilt, k + 1; the first entries of the group are the largest, in their order. size = -1: a NaN, or too few scores.
    """
    top, places, room = space
    inverse, floor = rows.limits(w, theta)
    a = blocks.maximum(row)
    if np.isnan(a):
        return -1, a, 1.0, 0.0
    if np.isfinite(a):
        mass = rows.odds(row, a, inverse, floor, w)
        if np.isnan(mass):
            return -1, a, 1.0, 0.0
        if limit * mass >= k:
            return 0, a, k / mass, k / mass
    if not select.largest(row, NO_CLASS, top, places, room) or not np.isfinite(top[depth - 1]):
        return -1, a, 1.0, 0.0
    a = top[depth - 1]
    mass = rows.odds(row, a, inverse, floor, w)
    if np.isnan(mass):
        return -1, a, 1.0, 0.0
    for j in range(depth):
        w[places[j]] = 0
        E[j], where[j] = odds_of(top[j], a, theta), places[j]
    mass, size, found = tail_mass(w), depth, depth
    u = balance(E[:size], mass, depth)
    while size <= len(E):  # classes that join the group make u grow, for the tail's odds counted for too much
        found = places_above(w, w.dtype.type(limit / u), where[size:])
        if found == 0:
            break
        for j in range(size, size + found):
            E[j] = odds_of(row[where[j]], a, theta)
            w[where[j]] = 0
        size += found
        mass = tail_mass(w)
        u = balance(E[:size], mass, depth)
    while size > 0 and E[size - 1] * u <= limit:  # the last of the largest, which need no products either
        size -= 1
        w[where[size]] = E[size]
    return size, a, u, min(u * blocks.maximum(w), limit)


@compiled
def tail_mass(w):
    mass = 0.0
    for start in range(0, len(w), blocks.PIECE):
        mass += np.float64(blocks.total(w[start : start + blocks.PIECE]))
    return mass


@compiled
def space(n, depth, dtype):
    """Scratch memory of :func:`split`."""
    return np.empty(depth, dtype), np.empty(depth, np.int64), select.room(n, depth, dtype)


@compiled
def borrowed_space(space):
    top, places, (maxima, found, scores) = space
    return borrowed(top), borrowed(places), (borrowed(maxima), borrowed(found), borrowed(scores))


@compiled
def power_sums(w, most, P, piece):
    """The power sums of a tail, and how many: the others are too small to matter, with tilted odds of at most ``most``,
    and are 0."""
    count = rows.reach(most / (1 - most), len(P), w.itemsize)
    rows.power_sums(w, P[:count], piece)
    for j in range(count, len(P)):
        P[j] = 0
    return count


@compiled
def odds_of(score, a, theta):
    return math.exp(min((np.float64(score) - np.float64(a)) / theta, LARGEST))


@compiled
def balance(E, mass, k):
    """u where sum_i E_i u / (1 + E_i u) + mass u = k - 1/2, about: of a top group E, largest first, and the tail."""
    first = min(k - 1, len(E))
    rest = mass
    for j in range(first, len(E)):
        rest += E[j]
    u = (k - first) / rest
    for m in range(first - 1, -1, -1):
        rest += E[m]
        u = max(u, (k - m) / rest)  # draws from k/2 to k classes: Newton's method goes on from there, from below
    for _ in range(20):
        drawn, slope = mass * u, mass
        for j in range(len(E)):
            q = 1 / (1 + E[j] * u)
            drawn += E[j] * u * q
            slope += E[j] * q * q
        missing = k - 0.5 - drawn
        u += missing / slope
        if abs(missing) < 0.05:
            break
    return u
