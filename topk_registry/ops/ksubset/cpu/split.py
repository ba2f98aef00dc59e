"""Kernels, compiled by numba, that split the classes of a row of scores into a top group and a tail.

A class with the odds w has the factor 1 + w X, and margins follow from products of factors. The top group contains the
classes with large odds. Later steps multiply the factors of these classes one by one. The tail contains all other
classes. Later steps only need sums of powers of the odds of the tail.

If no softmax probability of a row exceeds limit / k, the top group is empty. Here ``limit`` is an argument of
:func:`split`. Such a row is called flat, and needs no search for the largest scores.
"""

import numpy as np

from topk_registry.ops.cpu import blocks, select
from topk_registry.ops.cpu.masks import places_from
from topk_registry.ops.cpu.numbers import borrowing, compiled, exp64, summing
from topk_registry.ops.ksubset.cpu import loops

MAX_GAP = 600.0  # maximum of (s - a) / theta: odds and their sums are finite, and larger values give the same results
INVALID, CERTAIN = -1, -2  # returned in place of a size if a score is NaN, or if only one set of classes is possible


@borrowing
def split(row, k, depth, limit, theta, space, w, members, where):
    """Split the classes of a row of scores into a top group and a tail.

    Class i with score s_i has the odds w_i = exp((s_i - a) / theta), where a is a reference score. The function finds a
    number u such that sum_i u w_i / (1 + u w_i) is about depth - 1/2. If the row is flat, the top group is empty.
    Otherwise, the top group contains the ``depth`` largest classes and all classes with u w_i > limit. All other
    classes are the tail.

    Args:
        row: scores, padded with -inf. Classes with the score -inf are excluded.
        k: as in top-k.
        depth: k if the row is without its label, or k + 1 if the margins of all classes are computed.
        limit: maximum of u w_i in the tail.
        theta: temperature.
        space: result of :func:`scratch_space`.
        w: output, the products u w_i for all classes of the tail, and 0 for all other classes. These products are at
            most ``limit``, so their powers do not overflow in single precision.
        members, where: output, odds and indices of the classes of the top group. The ``depth`` largest classes come
            first, in descending order of their odds.

    Returns:
        (size, a, u, most). ``size`` is the number of classes in the top group, ``a`` and ``u`` are the numbers above,
        and ``most`` is the largest u w_i in the tail. If fewer than ``depth`` scores are above -inf, ``size`` is
        CERTAIN. If a score is NaN, or ``depth`` scores are inf, ``size`` is INVALID.
    """
    top, places = space
    a = blocks.largest_of(row)
    if np.isnan(a) or (not np.isfinite(a) and blocks.has_nan(row)):  # largest_of does not see NaNs with a minus sign
        return INVALID, a, 1.0, 0.0
    if np.isfinite(a):
        mass = loops.odds(row, a, theta, w)
        if np.isnan(mass):
            return INVALID, a, 1.0, 0.0
        if limit * mass >= k:
            u, most = _tilted(w, k / mass)
            return 0, a, u, most
    select.largest(row, top, places)
    if top[depth - 1] == -np.inf:
        return CERTAIN, a, 1.0, 0.0
    a = top[depth - 1]
    mass = loops.odds(row, a, theta, w)
    if np.isnan(mass) or not np.isfinite(a):
        return INVALID, a, 1.0, 0.0
    for j in range(depth):
        w[places[j]] = 0
        members[j], where[j] = top[j], places[j]
    to_odds(members[:depth], a, theta)
    mass, size = blocks.total_of(w), depth
    u = balance(members[:size], mass, depth, 0.0)
    while size <= len(members):  # u grows when a class joins, because the tail counts u w in place of u w / (1 + u w)
        joined = places_from(w, w.dtype.type(limit / u), where[size:])
        if joined == 0:
            break
        for j in range(size, size + joined):
            members[j] = row[where[j]]
            w[where[j]] = 0
        to_odds(members[size : size + joined], a, theta)
        size += joined
        mass = blocks.total_of(w)
        u = balance(members[:size], mass, depth, u)
    u, most = _tilted(w, u)
    return size, a, u, min(most, limit)


@borrowing
def _tilted(w, u):
    factor = w.dtype.type(u)  # u, rounded to single precision
    for i in range(len(w)):
        w[i] *= factor
    return np.float64(factor), np.float64(blocks.largest_of(w))


@compiled
def scratch_space(depth):
    return np.empty(depth, np.float32), np.empty(depth, np.int64)


@borrowing
def power_sums(w, most, P, scratch):
    """Write P[j - 1] = sum_i w_i^j for the powers j that affect results, and return the number of these sums.

    All other entries of P become 0. :func:`split` returns ``w`` and ``most``. ``scratch`` is memory for CACHE_BLOCK
    numbers.
    """
    count = loops.reach(most / (1 - most), len(P))
    loops.power_sums(w, P[:count], scratch)
    for j in range(count, len(P)):
        P[j] = 0
    return count


@borrowing
def to_odds(scores, a, theta):
    """Replace each score s by the odds exp((s - a) / theta). The exponent is limited to -MAX_GAP..MAX_GAP."""
    reference = np.float64(a)
    for j in range(len(scores)):
        scores[j] = exp64(min(max((scores[j] - reference) / theta, -MAX_GAP), MAX_GAP))


@borrowing
def balance(members, mass, k, u):
    """Return the number v for which sum_i v E_i / (1 + v E_i) + v mass is about k - 1/2, by Newton's method.

    ``members`` contains the odds E of the classes of the top group, of which the first k are the largest, in descending
    order. The k-th largest is 1. ``mass`` is the sum of the odds of all other classes. ``u`` is a lower bound of v, or
    0 if no bound is known.
    """
    if u == 0:  # begin at formula (5) of ../README.md, which is near: a few Newton steps suffice
        rest = mass + blocks.total(members[k:])
        for m in range(k - 1, -1, -1):
            rest += members[m]
            u = max(u, (k - m) / rest)
    for _ in range(20):
        drawn, slope = _drawn(members, u)
        missing = k - 0.5 - drawn - mass * u
        u += missing / (slope + mass)
        if abs(missing) < 0.05:
            break
    return u


@summing
def _drawn(members, u):
    drawn = slope = 0.0  # expected number of classes of the top group in the set, and its derivative in u
    for j in range(len(members)):
        q = 1 / (1 + members[j] * u)
        drawn += members[j] * u * q
        slope += members[j] * q * q
    return drawn, slope
