"""Split a row into its top group and its tail. See README.md.

The top group consists of the classes whose odds exceed a limit, at the tilt with an expected number of k - 1/2 classes.
If no softmax probability of a row exceeds limit / k, the row is flat: the top group is empty, and no search is needed.
"""

import numpy as np

from topk_registry.ops.cpu import blocks, select
from topk_registry.ops.cpu.masks import places_above
from topk_registry.ops.cpu.memory import empty
from topk_registry.ops.cpu.numbers import NO_CLASS, borrowing, compiled, exp64, summing
from topk_registry.ops.ksubset import passes

MAX_GAP = 600.0  # maximum of (s - a) / theta: odds and sums stay finite, and larger gaps do not change results
MANY, AT_ONCE = 8, 0.6  # if the first round finds more than MANY classes, the limit is multiplied by AT_ONCE
INVALID, CERTAIN = -1, -2  # codes in place of a size: a score is NaN; only one set is possible


@borrowing
def split(row, k, depth, limit, theta, space, w, members, where):
    """Split a row for sets of k classes at the tilt with an expected depth - 1/2 classes; depth is k or k + 1.

    Args:
        row: scores, padded with -inf, which excludes a class.
        k, depth, theta: as above.
        limit: maximum odds in the tail.
        space: memory from :func:`scratch_space`.
        w: output, odds of the tail relative to a, and 0 elsewhere.
        members, where: output, odds relative to a and classes of the top group, with the k largest first.

    Returns:
        (size, a, u, most): the size of the top group, or INVALID or CERTAIN; the reference score a of odds; the tilt u
        = exp(-t); and the largest tilted odds in the tail.
    """
    top, places, scratch = space
    a = blocks.largest_of(row)
    if np.isnan(a):
        return INVALID, a, 1.0, 0.0
    if np.isfinite(a):
        mass = passes.odds(row, a, theta, w)
        if np.isnan(mass):
            return INVALID, a, 1.0, 0.0
        if limit * mass >= k:
            return 0, a, k / mass, k / mass
    if not select.largest(row, NO_CLASS, top, places, scratch) or top[depth - 1] == -np.inf:
        return CERTAIN, a, 1.0, 0.0
    a = top[depth - 1]
    mass = passes.odds(row, a, theta, w)
    if np.isnan(mass) or not np.isfinite(a):
        return INVALID, a, 1.0, 0.0
    for j in range(depth):
        w[places[j]] = 0
        members[j], where[j] = top[j], places[j]
    to_odds(members[:depth], a, theta)
    mass, size = blocks.total_of(w), depth
    u = balance(members[:size], mass, depth, 0.0)
    while size <= len(members):  # u grows when classes join, because the tail overestimated their odds
        joined = places_above(w, w.dtype.type(limit / u), where[size:])
        if joined == 0:
            break
        if size == depth and joined > MANY:  # u will grow by much, so more classes join at once, which saves a round
            joined = places_above(w, w.dtype.type(AT_ONCE * limit / u), where[size:])
        for j in range(size, size + joined):
            members[j] = row[where[j]]
            w[where[j]] = 0
        to_odds(members[size : size + joined], a, theta)
        size += joined
        mass = blocks.total_of(w)
        u = balance(members[:size], mass, depth, u)
    if size == depth:
        for j in range(depth - 1, -1, -1):
            if members[j] * u <= limit:  # belongs to the tail as well, but a class after the k largest is moved first
                size -= 1
                w[where[j]] = members[j]
                members[j], where[j] = members[size], where[size]
    return size, a, u, min(u * blocks.largest_of(w), limit)


@compiled
def scratch_space(n, depth):
    """Return scratch memory for :func:`split`."""
    return empty(depth, np.float32), empty(depth, np.int64), select.scratch(n, depth, np.float32)


@borrowing
def power_sums(w, most, P, scratch):
    """Write the power sums of a tail and return how many are needed. All other power sums are 0.

    ``most`` is the largest of the tilted odds.
    """
    count = passes.reach(most / (1 - most), len(P))
    passes.power_sums(w, P[:count], scratch)
    for j in range(count, len(P)):
        P[j] = 0
    return count


@borrowing
def to_odds(scores, a, theta):
    """Replace scores by odds relative to a."""
    reference = np.float64(a)
    for j in range(len(scores)):
        scores[j] = exp64(min(max((scores[j] - reference) / theta, -MAX_GAP), MAX_GAP))


@borrowing
def balance(members, mass, k, u):
    """Return u with sum_i E_i u / (1 + E_i u) + mass u = k - 1/2 approximately, for odds E of a top group.

    ``mass`` is the sum of the odds of the tail. The k-th largest class has odds of 1. ``u`` is a lower bound or 0,
    because Newton's method converges from below.
    """
    if u == 0:  # where sum_i min(E_i u, 1) + mass u = k, k/2 to k classes are drawn: a few Newton steps suffice
        least = 1.0
        for _ in range(len(members) + 1):
            certain, rest = _apart(members, least)
            larger = (k - certain) / (rest + mass)
            if not larger > 1.01 * u:
                break
            u, least = larger, 1 / larger
    for _ in range(20):
        drawn, slope = _drawn(members, u)
        missing = k - 0.5 - drawn - mass * u
        u += missing / (slope + mass)
        if abs(missing) < 0.05:
            break
    return u


@summing
def _apart(members, least):
    """Return the number of odds above ``least``, and the sum of the other odds."""
    certain = rest = 0.0
    for j in range(len(members)):
        certain += 1.0 if members[j] > least else 0.0
        rest += members[j] if members[j] <= least else 0.0
    return certain, rest


@summing
def _drawn(members, u):
    """Return the expected number of classes in the set from a top group at tilt u, and its derivative in u."""
    drawn = slope = 0.0
    for j in range(len(members)):
        q = 1 / (1 + members[j] * u)
        drawn += members[j] * u * q
        slope += members[j] * q * q
    return drawn, slope
