"""One row at a time for large k: any class is left out of the polynomial by a division, see "Large k" in README.md.

The polynomial reaches beyond c_k. A class that is out of a random k-set more often than in it is divided out upward,
from c_0; any other downward, from the last coefficient. Errors shrink either way. Both are Horner's rule: downward, the
coefficients are in reverse order and 1 / v takes the place of the odds v.
"""
# pyright: reportCallIssue=false, reportArgumentType=false

import math
from collections import namedtuple

import numpy as np

from topk_registry.ops.cpu import blocks
from topk_registry.ops.cpu.memory import borrowed, empty, zeros
from topk_registry.ops.cpu.numbers import compiled, exp64, summing
from topk_registry.ops.ksubset.numba import groups, narrow, rows
from topk_registry.ops.ksubset.numba.hinges import hinge_of

LINE = 32  # numbers that all arrays are padded to: no loop of vector instructions has numbers left over
LEAST = 1e-280  # smaller coefficients are 0: denormal numbers are slow
# c_0..c_D of a product, with as many zeros in front, and room for the next product; signed power sums, in reverse
# order; c_0..c_k and, in reverse order, c_D..c_{k-1}.
Polynomial = namedtuple("Polynomial", "c spare signed up down")
# A side of the top group: odds, or their reciprocals, and places among the scores.
Side = namedtuple("Side", "v where")


@compiled
def padded(count):
    return (count + LINE - 1) // LINE * LINE


@compiled
def rounding(itemsize):
    """What is too small to matter beside 1."""
    return 2.0**-38 if itemsize == 4 else 2.0**-64


@compiled
def polynomial_memory(k, n, itemsize):
    """Memory for the polynomial of a row.

    c_{j+1} / c_j is at most k / (j + 1) where c_{k-1} = c_k, by Newton's inequalities: the coefficients end where the
    next one is below rounding.
    """
    degree, ratio = k + 1, 1.0
    while degree < n and ratio > rounding(itemsize):
        degree += 1
        ratio *= k / degree
    powers = padded(powers_of(k))
    lead = max(padded(degree + 1), powers)  # as many zeros in front as there may be power sums
    return Polynomial(
        zeros(2 * lead), zeros(2 * lead), zeros(powers), rows.coefficients(k, np.float64),
        zeros(blocks.FRONT + lead - k + 1),
    )  # fmt: skip


@compiled
def powers_of(k):
    """The number of power sums, for coefficients beyond c_k too: powers of 1/3, a class's largest odds over the chance
    that it is out, fall below rounding."""
    return max(k, 42)


@compiled
def side(most):
    """Memory for one side of a top group of up to ``most`` classes."""
    return Side(zeros(padded(most)), zeros(padded(most), np.int64))


@compiled
def borrowed_side(one):
    return borrowed(one.v), borrowed(one.where)


@compiled
def multiply(E, size, u, P, powers, k, tilt, memory):
    """Return the coefficients of the tail's polynomial times the factors of the top group, tilted by u; the first half
    of the array is zeros. Without a top group they end with c_k.

    P are the power sums of the tail's odds, which are tilted by ``tilt``.
    """
    c, spare, signed = borrowed(memory.c), borrowed(memory.spare), borrowed(memory.signed)
    lead, line, factor = len(c) // 2, padded(powers), tilt
    signed[:line] = 0
    for j in range(powers):
        signed[line - 1 - j] = P[j] * factor
        factor *= -tilt
    largest = c[lead] = exp64(-0.5 * min(signed[line - 1], 1200.0))
    last = 0  # the coefficients after it are too small to matter
    for j in range(1, lead if size > 0 else k + 1):
        at = lead + j - line
        total = dot(c[at : at + line], signed[:line]) / j
        c[lead + j] = total if total > LEAST else 0.0
        largest = max(largest, total)
        if total < 1e-60 * largest:
            break
        last = j
    c[lead + last + 1 :] = 0
    spare[lead:] = 0
    if size % 2 == 1:
        last = min(last + 1, lead - 1)
        p, q = chances(E[size - 1] * u)
        _times(c[: lead + padded(last + 1)], lead, q, p, 0.0, spare)
        c, spare = spare, c
    for j in range(0, size - 1, 2):
        last = min(last + 2, lead - 1)
        p, q = chances(E[j] * u)
        other, rest = chances(E[j + 1] * u)
        _times(c[: lead + padded(last + 1)], lead, q * rest, p * rest + q * other, p * other, spare)
        c, spare = spare, c
    return c


@compiled
def chances(odds):
    """Return the chances of being in and out."""
    q = 1 / (1 + odds)
    return (odds * q if q > 0.0 else 1.0), q


@summing
def dot(x, y):
    total = 0.0
    for i in range(len(x)):
        total += x[i] * y[i]
    return total


@compiled
def _times(c, lead, zeroth, first, second, out):
    """out <- the product with zeroth + first X + second X^2."""
    here, before, earlier = c[lead:], c[lead - 1 :], c[lead - 2 :]
    written = out[lead : len(c)]
    for i in range(len(written)):
        one = zeroth * here[i] + (first * before[i] + second * earlier[i])
        written[i] = one if one > LEAST else 0.0


@compiled
def balance(c, size, k, at_label, up, down, of_tail):
    """Tilt c by log rho, rho = c_{k-1} / c_k, and scale it, so that both become 1; return rho, the numbers of
    coefficients below and above c_k that matter, and the odds of a class that is about as often in a set as out of it.

    ``up`` <- c_0..c_k, ``down`` <- c_D..c_{k-1}, and ``of_tail`` <- those of ``up`` that matter to the tail.
    """
    lead = len(c) // 2
    rho = c[lead + k - 1] / c[lead + k]
    scale, back, lower, higher, limit = 1 / c[lead + k], 1 / rho, 0, 0, 1.0
    if size > 0 and not at_label:
        limit = math.sqrt(c[lead + k + 1] * scale * rho)
    factor, least = scale, rounding(of_tail.itemsize)
    beside = least
    for j in range(k, -1, -1):
        one = c[lead + j] * factor
        one = one if one > LEAST else 0.0
        c[lead + j] = up[blocks.FRONT + j] = one
        of_tail[blocks.FRONT + j] = one if one > 2.0**-70 else 0.0
        lower = k - j if one > beside else lower
        beside = beside / limit if j < k else beside
        factor *= back
    if size > 0:
        down[len(down) - 1] = down[len(down) - 2] = 1.0
        for j in range(1, lead - k):
            scale *= rho
            one = c[lead + k + j] * scale
            one = one if one > LEAST else 0.0
            c[lead + k + j] = down[len(down) - 2 - j] = one
            higher = j if one > least * c[lead + k + 1] else higher
            least *= limit
    return rho, lower, higher, limit


@compiled
def divide(E, where, size, tilt, limit, low, low_where, high, high_where):
    """Share out the top group: odds up to ``limit``, and the reciprocals of higher ones. Return how many each."""
    lower = higher = 0
    for j in range(size):
        v = E[j] * tilt
        if v > limit:
            high[higher], high_where[higher] = 1 / v, where[j]
            higher += 1
        else:
            low[lower], low_where[lower] = v, where[j]
            lower += 1
    low[lower : padded(lower)] = 0
    high[higher : padded(higher)] = 0
    return lower, higher


# Memory for a label's margin: scratch of the search for the top group; a row's scores x and odds, a block of numbers in
# either precision, the tail's coefficients, places and odds of the top group, power sums, the polynomial, the sides of
# the top group; and of narrow rows the expansion and room for its terms.
LabelMemory = namedtuple("LabelMemory", "space x odds scratch wide c where E power polynomial low high expansion terms")


@compiled
def label_memory(width, n, k, dtype):
    """Memory for :func:`label_rows`, which works on a row at a time."""
    m, most = blocks.padded(n), min(5 * k + 5, blocks.padded(n))
    x = empty(m, dtype)
    return LabelMemory(
        groups.space(m, k, dtype), x, empty(m, dtype), empty(blocks.CACHE_BLOCK, dtype),
        empty(blocks.CACHE_BLOCK), rows.coefficients(k, dtype), empty(most, np.int64), empty(most),
        empty(powers_of(k)),
        polynomial_memory(k, n, x.itemsize), side(most), side(most),
        narrow.expand(n - 1, 1, k, x.itemsize), empty((3, narrow.MOST_TERMS + 1)),
    )  # fmt: skip


@compiled
def label_rows(s, is_bfloat16, label, k, theta, margin, gradient, alpha, scale, tau, factors, value, memory):
    """:func:`topk_registry.ops.ksubset.numba.kernels.label_rows` for large k."""
    for r in range(len(s)):
        margin[r], value[r] = label_row(
            s[r], is_bfloat16, label[r], k, theta, gradient[r], alpha, scale, tau, factors[r], memory
        )


@compiled
def label_row(s, is_bfloat16, y, k, theta, gradient, alpha, scale, tau, factor, memory):
    """Return the margin and the value of a row: a narrow one, or one whose classes are left out by division."""
    w, power = borrowed(memory.odds), borrowed(memory.power)
    scratch, wide = borrowed(memory.scratch), borrowed(memory.wide)
    E, where, x, of_tail = borrowed(memory.E), borrowed(memory.where), borrowed(memory.x), borrowed(memory.c)
    up, down = borrowed(memory.polynomial.up), borrowed(memory.polynomial.down)
    low, low_where = borrowed_side(memory.low)
    high, high_where = borrowed_side(memory.high)
    terms, expansion = borrowed(memory.terms), memory.expansion
    n, size, real, margin = len(gradient), -1, memory.x.dtype.type, np.nan
    of_label, a, u, most, rho, below, above, count = real(0), real(0), 1.0, 0.0, 1.0, 0, 0, 0
    if 0 <= y < n:
        blocks.load(s[:n], is_bfloat16, x)
        of_label, x[y] = x[y], -np.inf
    if of_label == of_label and 0 <= y < n:
        count, a, u = narrow.centred(x, n - 1, theta, expansion, w, terms[0], terms[1])
        if count == 0:
            space = groups.borrowed_space(memory.space)
            size, a, u, most = groups.split(x, k, k, groups.AT_ALL, theta, space, w, E, where)
    if count > 0:
        rho = narrow.label_polynomial(terms[1, : count + 1], n - 1, k, expansion, terms[2])
    elif size >= 0:
        powers = groups.power_sums(w, most, power, scratch)
        c = multiply(E, size, u, power, powers, k, u, memory.polynomial)
        rho, below, above, _ = balance(c, size, k, True, up, down, of_tail)
    if count > 0 or size >= 0:
        margin = np.float64(of_label) - np.float64(a) + theta * math.log(u * rho)
    value, of_margin = hinge_of(margin, y, alpha, scale, tau, factor)
    if margin != margin:
        blocks.fill(w, real(np.nan))
    elif count > 0:
        narrow.label_gradient(w, expansion.p, terms[2], count, of_margin)
        w[y] = of_margin
    else:
        count = min(rows.reach(most * rho, k, w.itemsize), below)
        rows.label_gradient(w, of_tail, real(u * rho), real(of_margin), count, scratch)
        lower, higher = divide(E, where, size, u * rho, 1.0, low, low_where, high, high_where)
        rows.label_gradient(low[: padded(lower)], up, 1.0, of_margin, below, wide)
        rows.label_gradient(high[: padded(higher)], down, 1.0, of_margin, above, wide)
        for j in range(lower):
            w[low_where[j]] = low[j]
        for j in range(higher):
            w[high_where[j]] = high[j]
        w[y] = of_margin
    blocks.store(w, is_bfloat16, gradient)
    return margin, value
