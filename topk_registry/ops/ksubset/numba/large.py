"""One row at a time for large k: any class is left out of the polynomial by a division, see "Large k" in README.md.

The polynomial reaches beyond c_k. A class that is out of a random k-set more often than in it is divided out upward,
from c_0; any other downward, from the last coefficient. Errors shrink either way. Both are Horner's rule: downward, the
coefficients are in reverse order and 1 / v takes the place of the odds v. Upward it is done at a few points only.
"""
# pyright: reportCallIssue=false, reportArgumentType=false

import math
from collections import namedtuple

import numpy as np

from topk_registry.ops.cpu import blocks, points
from topk_registry.ops.cpu.memory import borrowed, empty, zeros
from topk_registry.ops.cpu.numbers import compiled, exp64
from topk_registry.ops.ksubset.numba import groups, narrow, rows
from topk_registry.ops.ksubset.numba.hinges import hinge_of

LINE = 32  # numbers that all arrays are padded to: no loop of vector instructions has numbers left over
LEAST = 1e-280  # smaller coefficients are 0: denormal numbers are slow
AT_ONCE = 4  # coefficients of the tail: what they add to later ones is added for all of them together
LEAST_OF_TAIL = 1e-32  # of the tail's largest coefficient: later ones do not matter, however c is tilted on
# c_0..c_D of a product, with as many zeros in front, and room for the next product; signed power sums, and zeros;
# c_0..c_k and, in reverse order, c_D..c_{k-1}.
Polynomial = namedtuple("Polynomial", "c spare signed up down")
# The classes that are divided out downward: the reciprocals of their odds, and places among the scores.
High = namedtuple("High", "v where")


@compiled
def padded(count):
    return (count + LINE - 1) // LINE * LINE


@compiled
def rounding(itemsize):
    """Return the largest number that does not matter beside 1."""
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
    lead = padded(degree + 1)
    return Polynomial(
        zeros(2 * lead), zeros(2 * lead), zeros(padded(powers_of(k)) + LINE), rows.coefficients(k, np.float64),
        zeros(blocks.FRONT + lead - k + 1),
    )  # fmt: skip


@compiled
def powers_of(k):
    """The number of power sums, for coefficients beyond c_k too: powers of 1/2, a class's largest odds over the chance
    that it is out, fall below rounding."""
    return max(k, 42)


@compiled
def high_memory(most):
    """Memory for up to ``most`` classes that are divided out downward."""
    return High(zeros(padded(most)), zeros(padded(most), np.int64))


@compiled
def multiply(E, size, u, P, powers, k, tilt, memory):
    """Return the coefficients of the tail's polynomial times the factors of the top group, tilted by u; the first half
    of the array is zeros. Without a top group they end with c_k.

    P are the power sums of the tail's odds, which are tilted by ``tilt``.
    """
    c, spare = memory.c, memory.spare
    lead = len(c) // 2
    last = expand(P, powers, tilt, c, memory.signed, lead if size > 0 else k + 1)
    c[lead + last + 1 :] = 0
    spare[lead:] = 0
    for j in range(0, size, 4):
        last = min(last + 4, lead - 1)
        zeroth, first, second = pair(E, j, size, u)
        third, fourth, fifth = pair(E, j + 2, size, u)
        _times(
            c[: lead + padded(last + 1)], lead, zeroth * third, zeroth * fourth + first * third,
            (zeroth * fifth + second * third) + first * fourth, first * fifth + second * fourth, second * fifth, spare,
        )  # fmt: skip
        c, spare = spare, c
    return c


@compiled
def pair(E, j, size, u):
    """Return the coefficients of the factors of classes j and j + 1, of 1 where there are no more than ``size``."""
    p, q = chances(E[j] * u if j < size else 0.0)
    other, rest = chances(E[j + 1] * u if j + 1 < size else 0.0)
    return q * rest, p * rest + q * other, p * other


@compiled
def expand(P, powers, tilt, c, signed, stop):
    """Write the coefficients of the tail's polynomial before the one numbered ``stop`` that matter, by Newton's
    identities; return the number of the last."""
    lead, factor, last = len(c) // 2, tilt, 0
    c[lead:], signed[:] = 0, 0
    for j in range(powers):
        signed[j] = P[j] * factor
        factor *= -tilt
    first_power, second_power, third_power = signed[0], signed[1], signed[2]
    largest = exp64(-0.5 * min(first_power, 1200.0))
    for j in range(0, stop, AT_ONCE):
        sums = c[lead + j : lead + j + AT_ONCE]  # j e_j, as far as the coefficients before these make it up
        zeroth = large_enough(sums[0] / j) if j > 0 else largest
        first = large_enough((sums[1] + first_power * zeroth) / (j + 1))
        second = large_enough((sums[2] + second_power * zeroth + first_power * first) / (j + 2))
        third = large_enough((sums[3] + third_power * zeroth + second_power * first + first_power * second) / (j + 3))
        sums[0], sums[1], sums[2], sums[3] = zeroth, first, second, third
        last, largest = min(j + 3, stop - 1), max(largest, zeroth, first, second, third)
        if third <= LEAST_OF_TAIL * largest:
            break
        _add_to_later(c[lead + j + AT_ONCE :], signed, min(powers, lead - j - AT_ONCE), zeroth, first, second, third)
    return last


@compiled
def large_enough(coefficient):
    return coefficient if coefficient > LEAST else 0.0


@compiled
def _add_to_later(c, signed, count, zeroth, first, second, third):
    """Add to the sums of ``count`` later coefficients what four coefficients make of them, the third just before
    them."""
    for i in range((count + 3) // 4 * 4):
        c[i] += (third * signed[i] + second * signed[i + 1]) + (first * signed[i + 2] + zeroth * signed[i + 3])


@compiled
def chances(odds):
    """Return the chances of being in and out."""
    q = 1 / (1 + odds)
    return (odds * q if q > 0.0 else 1.0), q


@compiled
def _times(c, lead, zeroth, first, second, third, fourth, out):
    """out <- the product with zeroth + first X + second X^2 + third X^3 + fourth X^4."""
    here, before, earlier, still, earliest = c[lead:], c[lead - 1 :], c[lead - 2 :], c[lead - 3 :], c[lead - 4 :]
    written = out[lead : len(c)]
    for i in range(len(written)):
        one = zeroth * here[i] + (first * before[i] + second * earlier[i])
        one += third * still[i] + fourth * earliest[i]
        written[i] = one if one > LEAST else 0.0


@compiled
def balance(c, size, k, at_label, up, down, itemsize):
    """Tilt c by log rho, rho = c_{k-1} / c_k, and scale it, so that both become 1; return rho, the numbers of
    coefficients below and above c_k that matter, and the odds of a class that is about as often in a set as out of it.

    ``up`` <- c_0..c_k, and ``down`` <- c_D..c_{k-1}.
    """
    lead = len(c) // 2
    rho = c[lead + k - 1] / c[lead + k]
    scale, back, lower, higher, limit = 1 / c[lead + k], 1 / rho, 0, 0, 1.0
    if size > 0 and not at_label:
        limit = math.sqrt(c[lead + k + 1] * scale * rho)
    factor, least = scale, rounding(itemsize)
    beside = least
    for j in range(k, -1, -1):
        one = c[lead + j] * factor
        one = one if one > LEAST else 0.0
        c[lead + j] = up[blocks.FRONT + j] = one
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
def divide(E, where, size, u, tilt, limit, w, high):
    """Share out the top group, with odds E tilted by u: those above ``limit`` go to ``high``, all others back to w, the
    tail's odds, which are tilted by ``tilt``. Return how many went to ``high``, and the largest that went back."""
    v, places, higher, largest, back = high.v, high.where, 0, 0.0, 1 / tilt
    for j in range(size):
        odds = E[j] * u
        if odds > limit:
            v[higher], places[higher] = 1 / odds, where[j]
            higher += 1
        else:
            w[where[j]] = odds * back
            largest = max(largest, odds)
    v[higher : padded(higher)] = 0
    return higher, largest


# Memory for a label's margin: scratch of the search for the top group; a row's scores x and odds, a block of numbers in
# either precision, places and odds of the top group, power sums, the polynomial, the high classes, the points; and of
# narrow rows chances, the expansion and room for its terms.
LabelMemory = namedtuple(
    "LabelMemory", "space x odds scratch wide where E power polynomial high points chances expansion terms"
)


@compiled
def label_memory(width, n, k, dtype):
    """Memory for :func:`label_rows`, which works on a row at a time."""
    m, most = blocks.padded(n), min(5 * k + 5, blocks.padded(n))
    x = empty(m, dtype)
    return LabelMemory(
        groups.space(m, k, dtype), x, empty(m, dtype), empty(blocks.CACHE_BLOCK, dtype),
        empty(blocks.CACHE_BLOCK), empty(most, np.int64), empty(most), empty(powers_of(k)),
        polynomial_memory(k, n, x.itemsize), high_memory(most), points.memory(points.count_of(x), dtype),
        empty(m, dtype), narrow.expand(n - 1, 1, k, x.itemsize), empty((3, narrow.MOST_TERMS + 1)),
    )  # fmt: skip


@compiled
def label_rows(s, is_bfloat16, label, k, theta, margin, gradient, alpha, scale, tau, factors, value, memory):
    """:func:`topk_registry.ops.ksubset.numba.kernels.label_rows` for large k."""
    memory = borrowed(memory)
    for r in range(len(s)):
        margin[r], value[r] = label_row(
            s[r], is_bfloat16, label[r], k, theta, gradient[r], alpha, scale, tau, factors[r], memory
        )


@compiled
def label_row(s, is_bfloat16, y, k, theta, gradient, alpha, scale, tau, factor, memory):
    """Return the margin and the value of a row: a narrow one, or one whose classes are left out by division."""
    w, power = memory.odds, memory.power
    E, where, x = memory.E, memory.where, memory.x
    up, down = memory.polynomial.up, memory.polynomial.down
    terms, expansion = memory.terms, memory.expansion
    n, size, real, margin = len(gradient), -1, memory.x.dtype.type, np.nan
    of_label, a, u, most, rho, below, above, count = real(0), real(0), 1.0, 0.0, 1.0, 0, 0, 0
    if 0 <= y < n:
        blocks.load(s[:n], is_bfloat16, x)
        of_label, x[y] = x[y], -np.inf
    if of_label == of_label and 0 <= y < n:
        a, mass = groups.odds_of_largest(x, theta, w)
        count, u = narrow.centred(w, mass, n - 1, expansion, memory.chances, terms[0], terms[1])
        if count == 0:
            size, a, u, most = groups.split(x, a, mass, k, k, groups.AT_POINTS, theta, memory.space, w, E, where)
    if count > 0:
        rho = narrow.label_polynomial(terms[1, : count + 1], n - 1, k, expansion, terms[2])
    elif size >= 0:
        powers = groups.power_sums_at_points(w, most, most / u, power, memory.points, memory.scratch)
        c = multiply(E, size, u, power, powers, k, u, memory.polynomial)
        rho, below, above, _ = balance(c, size, k, True, up, down, x.itemsize)
    if count > 0 or size >= 0:
        margin = np.float64(of_label) - np.float64(a) + theta * math.log(u * rho)
    value, of_margin = hinge_of(margin, y, alpha, scale, tau, factor)
    if margin != margin:
        blocks.fill(x, real(np.nan))
    elif count > 0:
        narrow.label_gradient(memory.chances, expansion.p, terms[2], count, of_margin, x)
        x[y] = of_margin
    else:
        tilt, high, wide = u * rho, memory.high.v, memory.wide
        places = memory.high.where
        higher, largest = divide(E, where, size, tilt, tilt, 1.0, w, memory.high)
        label_gradient(w, up, below, tilt, max(largest, most * rho), of_margin, memory.points, wide, x)
        rows.label_gradient(high[: padded(higher)], down, 1.0, of_margin, above, wide)
        for j in range(higher):
            x[places[j]] = high[j]
        x[y] = of_margin
    blocks.store(x, is_bfloat16, gradient)
    return margin, value


@compiled
def label_gradient(w, c, below, tilt, largest, slope, at, wide, out):
    """:func:`rows.label_gradient` by points, into ``out``; v = tilt w are up to ``largest``."""
    v, terms, powers = at.v, at.terms, at.c[: len(at.v)]
    scale = points.place(largest, v)
    d = wide[: len(v)]
    rows.horner(v, rows.in_fours(c, len(c) - blocks.FRONT - 2, below), d)
    for m in range(len(v)):
        d[m] = slope * tilt * (d[m] * (1.0 + v[m]) - 1.0)
    points.fit(d, terms, powers)
    blocks.fill(out, out.dtype.type(0))
    points.add_products(w, w, scale * tilt, powers, out)
