"""Splitting a row into its top group and its tail, see the operator's README.

The top group holds the classes whose odds are above a limit where k - 1/2 classes are drawn on average. A flat row,
with no softmax above limit / k, has none and is not searched: it is all tail.
"""

import math

import numpy as np

from topk_registry.ops.cpu import blocks, points, select
from topk_registry.ops.cpu.blocks import total_of
from topk_registry.ops.cpu.masks import places_above
from topk_registry.ops.cpu.memory import empty
from topk_registry.ops.cpu.numbers import NO_CLASS, compiled, exp64, summing
from topk_registry.ops.ksubset.numba import rows

LARGEST = 600.0  # of (s - a) / theta: odds and sums of them stay finite, and so much above makes no difference
# of (s_[k] - s_[k+1]) / theta: a class is in a set or out of it, but for exp(-FARTHEST)
FARTHEST = 45.0
MANY, AT_ONCE = 8, 0.6  # found in the first round of a search: so many go on with a limit lower by this factor
# From this depth on, single-precision scores are selected without sorting them. Double precision keeps the order: it
# halves a rounding error, which shows there.
IN_NO_ORDER = 32
AT_LABEL = 1 / 2  # limit of the tail's odds for the margin at a label and its gradient
AT_ALL = 1 / 4  # and for those of all classes, whose cotangents pass through the polynomials once more
AT_POINTS = 1 / 3  # and for large k, where power sums are taken at points


@compiled
def odds_of_largest(row, theta, w):
    """Return the largest score, and the sum of the odds relative to it, w: 0 if it is not finite, NaN if any is NaN."""
    a, mass = blocks.largest_of(row), 0.0
    inverse, floor = rows.limits(w, theta)
    if np.isnan(a):
        return a, np.nan
    if np.isfinite(a):
        mass = rows.odds(row, a, inverse, floor, w)
    return a, mass


@compiled
def split(row, a, mass, k, depth, limit, theta, space, w, E, where):
    """(size, a, u, most): the size of the top group, the reference a of odds, the factor u = exp(-t) that tilts them,
    and the largest of the tail's tilted odds. It is given what :func:`odds_of_largest` returns and writes.

    E[:size] and where[:size] are the top group's odds and classes, w the odds of the tail and 0 elsewhere, all relative
    to a. Scores of -inf are classes that are left out. The tilt draws depth - 1/2 classes, depth = k or, for a second
    tilt, k + 1; the k largest come first in the group. size = -1: a NaN, or too few scores.
    """
    top, places, room = space
    inverse, floor = rows.limits(w, theta)
    if np.isnan(mass):
        return -1, a, 1.0, 0.0
    if limit * mass >= k:
        return 0, a, k / mass, k / mass
    if depth < IN_NO_ORDER or row.itemsize == 8:
        enough = select.largest(row, NO_CLASS, top, places, room)
    else:
        enough = select.lowest_last(row, top, places, room)
    if not enough or not np.isfinite(top[depth - 1]):
        return -1, a, 1.0, 0.0
    a = top[depth - 1]
    mass = rows.odds(row, a, inverse, floor, w)
    if np.isnan(mass):
        return -1, a, 1.0, 0.0
    for j in range(depth):
        w[places[j]] = 0
        E[j], where[j] = top[j], places[j]
    to_odds(E[:depth], a, theta)
    mass, size, joined = total_of(w), depth, depth
    u = balance(E[:size], mass, depth, 0.0)
    while size <= len(E):  # classes that join the group make u grow, for the tail's odds counted for too much
        joined = places_above(w, w.dtype.type(limit / u), where[size:])
        if joined == 0:
            break
        if size == depth and joined > MANY:  # u will grow much: more join at once, which spares a round
            joined = places_above(w, w.dtype.type(AT_ONCE * limit / u), where[size:])
        for j in range(size, size + joined):
            E[j] = row[where[j]]
            w[where[j]] = 0
        to_odds(E[size : size + joined], a, theta)
        size += joined
        mass = total_of(w)
        u = balance(E[:size], mass, depth, u)
    if size == depth:
        for j in range(depth - 1, -1, -1):
            if E[j] * u <= limit:  # needs no products either; one after the k largest goes before them
                size -= 1
                w[where[j]] = E[j]
                E[j], where[j] = E[size], where[size]
    return size, a, u, min(u * blocks.largest_of(w), limit)


@compiled
def at_kth(row, a, mass, k, theta, space, w, E, where, P, at, scratch):
    """(size, kth, beyond, u, to_next, most, powers): :func:`split` for the margins of all classes.

    kth: the k-th largest score, to which E is relative. w is relative to the next one, whose odds are ``to_next``.
    Where it is farther below than FARTHEST, it and all after it are taken to be higher: margins of the k largest are
    ``beyond`` more. most: the largest of w. P: the power sums of w, of which ``powers`` matter.
    """
    size, a, u, most = split(row, a, mass, k, k + 1, AT_POINTS, theta, space, w, E, where)
    kth, beyond, to_next = a, 0.0, 1.0
    if size < 0:
        return size, kth, beyond, 1.0, to_next, 0.0, 0
    most, powers = most / u, power_sums_at_points(w, most, most / u, P, at, scratch)
    if size > 0:
        kth = space[0][k - 1]
        distance = (np.float64(kth) - np.float64(a)) / theta
        beyond, to_next = theta * max(distance - FARTHEST, 0.0), math.exp(-min(distance, FARTHEST))
        for j in range(size):  # E is relative to a, and cut off far above it
            E[j] = row[where[j]] if j < k else E[j] * to_next
        to_odds(E[: min(size, k)], kth, theta)
        u = balance(E[:size], P[0] * to_next, k, 0.0)
    return size, kth, beyond, u, to_next, most, powers


@compiled
def space(n, depth, dtype):
    """Scratch memory of :func:`split`."""
    return empty(depth, dtype), empty(depth, np.int64), select.room(n, depth, dtype)


@compiled
def power_sums(w, most, P, scratch):
    """The power sums of a tail, and how many: the others are too small to matter, with tilted odds of at most ``most``,
    and are 0."""
    count = rows.reach(most / (1 - most), len(P), w.itemsize)
    rows.power_sums(w, P[:count], scratch)
    for j in range(count, len(P)):
        P[j] = 0
    return count


@compiled
def power_sums_at_points(w, most, largest, P, at, scratch):
    """:func:`power_sums` by points; ``largest`` are the largest odds as they are in w."""
    count = rows.reach(most / (1 - most), len(P), w.itemsize)
    points.power_sums(w, largest, count, at, P, scratch)
    return count


@compiled
def to_odds(E, a, theta):
    """E <- the odds of these scores relative to a."""
    reference = np.float64(a)
    for j in range(len(E)):
        x = (E[j] - reference) / theta
        x = x if x < LARGEST else LARGEST
        E[j] = exp64(x if x > -LARGEST else -LARGEST)


@compiled
def balance(E, mass, k, u):
    """u where sum_i E_i u / (1 + E_i u) + mass u = k - 1/2, about: of a top group E and the tail, the odds of the k-th
    largest being 1.

    It starts from a smaller u, or 0: Newton's method goes on from below.
    """
    if u == 0:  # from k/2 to k classes are drawn where sum_i min(E_i u, 1) + mass u = k: a few steps from below
        least = 1.0
        for _ in range(len(E) + 1):
            certain, rest = _apart(E, least)
            larger = (k - certain) / (rest + mass)
            if not larger > 1.01 * u:
                break
            u, least = larger, 1 / larger
    for _ in range(20):
        drawn, slope = _drawn(E, u)
        missing = k - 0.5 - drawn - mass * u
        u += missing / (slope + mass)
        if abs(missing) < 0.05:
            break
    return u


@summing
def _apart(E, least):
    """How many odds are above this, and the sum of the others."""
    certain = rest = 0.0
    for j in range(len(E)):
        certain += 1.0 if E[j] > least else 0.0
        rest += E[j] if E[j] <= least else 0.0
    return certain, rest


@summing
def _drawn(E, u):
    """How many classes a top group draws on average, and the derivative to u."""
    drawn = slope = 0.0
    for j in range(len(E)):
        q = 1 / (1 + E[j] * u)
        drawn += E[j] * u * q
        slope += E[j] * q * q
    return drawn, slope
