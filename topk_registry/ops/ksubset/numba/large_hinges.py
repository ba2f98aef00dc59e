"""The hinges of all classes of one row, weighted, and their gradient, for large k: see "Large k" in README.md."""
# pyright: reportCallIssue=false, reportArgumentType=false

import math
from collections import namedtuple

import numpy as np

from topk_registry.ops.cpu import blocks
from topk_registry.ops.cpu.numbers import borrowed, compiled, exp64, log64, summing
from topk_registry.ops.ksubset.numba import groups, large, narrow, rows
from topk_registry.ops.ksubset.numba.hinges import LEAST_TAU, D, E, horner_twice, moments, tail_hinges
from topk_registry.ops.ksubset.numba.targets import FEW_CLASSES, gaps_and_gains, holds, mass_among, masses, one_hinge

# Classes of one side of the top group that have mass: odds or their reciprocals, scores less the k-th largest, masses,
# gaps, places; and their direct gradients.
Massive = namedtuple("Massive", "v distance mass gap where slope")
# Memory for a row: that of its split, its polynomial and the sides of its top group; masses, the direct gradient,
# cotangents of the coefficients and what becomes of them; gaps and gains of the classes, or CACHE_BLOCK equal ones; of
# narrow rows the expansion and room for its terms.
HingeMemory = namedtuple(
    "HingeMemory",
    "space x odds scratch wide c where E power polynomial low high massive_low massive_high mass direct dc series "
    "slopes alphas gains expansion terms",
)


@compiled
def hinge_memory(width, n, k, dtype, alpha, tau):
    """Memory for :func:`hinge_rows`, which works on a row at a time; gaps and gains included."""
    m = blocks.padded(n)
    most, x = min(5 * k + 5, m), np.empty(m, dtype)
    polynomial = large.polynomial_memory(k, n, x.itemsize)
    lead = len(polynomial.c) // 2
    alphas, gains = gaps_and_gains(n, alpha, tau, dtype)
    return HingeMemory(
        groups.space(m, k + 1, dtype), x, np.empty(m, dtype), np.empty(4 * blocks.CACHE_BLOCK, dtype),
        np.empty(4 * blocks.CACHE_BLOCK), rows.coefficients(k, dtype), np.empty(most, np.int64), np.empty(most),
        np.empty(large.powers_of(k)), polynomial, large.side(most), large.side(most), massive(most), massive(most),
        np.zeros(m, dtype), np.empty(m, dtype), np.zeros(2 * lead), np.zeros(lead),
        np.zeros((lead, 1)), alphas, gains, narrow.expand(n, 0, k, x.itemsize), np.zeros((10, narrow.MOST_TERMS + 1)),
    )  # fmt: skip


@compiled
def massive(most):
    """Memory for the classes with mass of one side."""
    p = large.padded(most)
    return Massive(np.empty(p), np.empty(p), np.empty(p), np.empty(p), np.empty(p, np.int64), np.empty(p))


@compiled
def hinge_rows(
    s, is_bfloat16, q, labels, shares, uniform, weight, alpha, factor, k, theta, scale, tau, value, out, memory
):  # fmt: skip
    """:func:`topk_registry.ops.ksubset.numba.expected.hinge_rows` for large k."""
    n, x, mass, d = out.shape[1], borrowed(memory.x), borrowed(memory.mass), borrowed(memory.odds)
    few, few_mass = np.empty(FEW_CLASSES, np.int64), np.empty(FEW_CLASSES)
    terms, tau = borrowed(memory.terms), max(tau, LEAST_TAU)
    for r in range(len(s)):
        blocks.load(s[r, :n], is_bfloat16, x)
        count = masses(r, q, labels, shares, uniform, weight, factor, mass[:n], few, few_mass)
        size, a, u = narrow.centred(x, n, theta, memory.expansion, d, terms[0], terms[1])
        if size > 0:
            value[r] = narrow_row(n, size, a, u, count, few, few_mass, alpha, k, theta, scale, tau, memory)
        else:
            value[r] = divided_row(count, few, few_mass, alpha, k, theta, scale, tau, memory)
        blocks.store(borrowed(memory.direct), is_bfloat16, out[r])


@compiled
def narrow_row(n, size, a, u, count, few, few_mass, alpha, k, theta, scale, tau, memory):
    """Return the hinge of a narrow row, of ``size`` terms; its gradient goes to memory."""
    expansion, terms, real = memory.expansion, borrowed(memory.terms), memory.x.dtype.type
    x, d, g = borrowed(memory.x), borrowed(memory.odds), borrowed(memory.direct)
    a_m, inverse, ratio, of_ratio = terms[1, : size + 1], terms[3, : size + 1], terms[4], terms[5]
    ratio[:] = 0
    of_equal = narrow.ratio_polynomial(a_m, n, k, expansion, terms[2, : size + 1], inverse, ratio[: size + 1])
    shift, total = math.log(u * of_equal), 0.0
    if count < 0:
        total = narrow.hinges(
            x, d, borrowed(memory.mass), memory.alphas, memory.gains, a, size, expansion, of_equal, shift, scale, tau,
            ratio, of_ratio, g, borrowed(memory.scratch),
        )  # fmt: skip
    else:
        blocks.fill(g, real(0))
        of_ratio[:] = 0
        for f in range(count):
            i = few[f]
            if few_mass[f] != 0:
                v, gap = np.float64(d[i]), np.float64(alpha[i if len(alpha) > 1 else 0])
                cost, own, through = narrow.hinge_of_class(
                    np.float64(x[i]), np.float64(a), v, few_mass[f], gap, shift, theta, scale, tau,
                    ratio[: size + 1], of_ratio,
                )  # fmt: skip
                total += cost
                g[i] += real(own + (expansion.p + v) * (1 - expansion.p - v) * through)
    narrow.ratio_slopes(a_m, expansion, inverse, ratio, of_ratio, terms[6:9], terms[9])
    narrow.add_slopes(d, expansion.p, terms[9], g)
    return total


@compiled
def divided_row(count, few, few_mass, alpha, k, theta, scale, tau, memory):
    """Return the hinge of a row whose classes are left out by division; its gradient goes to memory."""
    x, w, power, scratch = borrowed(memory.x), borrowed(memory.odds), borrowed(memory.power), borrowed(memory.scratch)
    E_top, where, of_tail, wide = borrowed(memory.E), borrowed(memory.where), borrowed(memory.c), borrowed(memory.wide)
    up, down = borrowed(memory.polynomial.up), borrowed(memory.polynomial.down)
    low, low_where = large.borrowed_side(memory.low)
    high, high_where = large.borrowed_side(memory.high)
    mass, g, dc = borrowed(memory.mass), borrowed(memory.direct), borrowed(memory.dc)
    real = memory.x.dtype.type
    space = groups.borrowed_space(memory.space)
    size, kth, beyond, u, gap, most, powers = groups.at_kth(x, k, theta, space, w, E_top, where, power, scratch)
    if size < 0:
        blocks.fill(g, real(np.nan))
        return np.nan
    c = large.multiply(E_top, size, u, power, powers, k, u * gap, memory.polynomial)
    rho, below, above, limit = large.balance(c, size, k, False, up, down, of_tail)
    lead, tilt, shift = len(c) // 2, gap * u * rho, math.log(u * rho)
    lower, higher = large.divide(E_top, where, size, u * rho, limit, low, low_where, high, high_where)
    known = few[: max(count, 0)]
    lower_mass = gather(
        low[:lower], low_where, x, kth, beyond, alpha, count < 0, mass, known, few_mass, memory.massive_low
    )
    higher_mass = gather(
        high[:higher], high_where, x, kth, beyond, alpha, count < 0, mass, known, few_mass, memory.massive_high
    )
    dc[lead:] = 0
    if count < 0:
        terms = min(1 + rows.reach(most * tilt, k, x.itemsize), below)
        total = tail_hinges(
            x, w, mass, borrowed(memory.alphas), borrowed(memory.gains), kth, of_tail, terms, tilt, shift, scale, tau,
            g, dc[lead : lead + k + 1], scratch,
        )  # fmt: skip
    else:
        total = 0.0
        blocks.fill(g, real(0))
        for f in range(count):
            i = few[f]
            if few_mass[f] != 0 and not holds(where[:size], i):
                distance, v = np.float64(x[i]) - np.float64(kth), np.float64(w[i]) * tilt
                cost, slope = one_hinge(
                    distance, np.float64(alpha[i if len(alpha) > 1 else 0]), few_mass[f], v, of_tail[blocks.FRONT :],
                    shift, theta, scale, tau, dc[lead : lead + k + 1],
                )  # fmt: skip
                total += few_mass[f] * cost
                g[i] += real(slope)
    in_up, in_down = rows.in_fours(up, k, below), rows.in_fours(down, len(down) - 2 - blocks.FRONT, above)
    total += side_hinges(
        lower_mass, memory.massive_low, in_up, 1.0, theta, shift, scale, tau, dc, lead + k, below, wide
    )
    total += side_hinges(
        higher_mass, memory.massive_high, in_down, -1.0, theta, shift, scale, tau, dc, lead + k, above, wide
    )
    for j in range(size):
        g[where[j]] = 0
    add_direct(lower_mass, memory.massive_low, g)
    add_direct(higher_mass, memory.massive_high, g)

    series, slopes = borrowed(memory.series), borrowed(memory.slopes)
    window = below + above + 1
    tail_terms = min(rows.reach(most * tilt / (1 - most * tilt), len(power), x.itemsize), window)
    end, steps = lead + k + above + 1, (window + 3) // 4 * 4
    correlate(dc, c, end, window, tail_terms, series)
    tail_slopes(series, tail_terms, tilt, slopes)
    rows.add_slopes(w, slopes, 0, tail_terms, g, scratch)
    add_through(low, low_where, lower, c, dc, end - steps, 1, steps, wide, g)
    add_through(high, high_where, higher, c, dc, end - 1, -1, steps, wide, g)
    return total


@compiled
def gather(v, places, x, kth, beyond, alpha, dense, mass, few, few_mass, found):
    """Write the classes of a side that have mass to ``found`` and return their number; their ``mass`` becomes 0."""
    count = 0
    for j in range(len(v)):
        i = places[j]
        m = np.float64(mass[i]) if dense else mass_among(i, few, few_mass)
        if dense:
            mass[i] = 0
        if m != 0:
            found.v[count], found.mass[count], found.where[count] = v[j], m, i
            found.distance[count] = np.float64(x[i]) - np.float64(kth) + (beyond if x[i] >= kth else 0.0)
            found.gap[count] = alpha[i if len(alpha) > 1 else 0]
            count += 1
    for j in range(count, large.padded(count)):
        found.v[j] = found.mass[j] = found.distance[j] = found.gap[j] = 0
    return count


@compiled
def side_hinges(count, classes, c, sign, theta, shift, scale, tau, dc, center, reach, scratch):
    """Return the sum of the hinges of one side; their direct gradient goes to ``classes``, that of the coefficients is
    added to dc, whose ``center`` is that of c_k.

    With y and z from :func:`horner_twice`, d = 1 - v y, and sign = -1 downward, the log-odds are sign log(y / d)
    besides the class's own; chain = sign g / (y d),

        dL/ds = sign chain (y - v z),   dL/dc_{k - sign (1 + j)} = chain (-v)^j,   dL/dc_k = -chain y.
    """
    value = 0.0
    for start in range(0, large.padded(count), blocks.CACHE_BLOCK):
        stop = min(start + blocks.CACHE_BLOCK, large.padded(count))
        v, slope = borrowed(classes.v)[start:stop], borrowed(classes.slope)[start:stop]
        distance, mass = borrowed(classes.distance)[start:stop], borrowed(classes.mass)[start:stop]
        horner_twice(v, c, 1.0, scratch)
        margins_of(distance, scratch, sign * theta, theta * shift)
        cost, of_center = chains_of(distance, mass, borrowed(classes.gap)[start:stop], scratch, sign, scale, tau, slope)
        value += cost
        dc[center] -= of_center
        chain, odds, step = scratch[E : E + len(v)], scratch[: len(v)], np.int64(-sign)
        for j in range(0, reach, 3):
            first, second, third = moments(chain, odds, 1e-250)
            at = center + step * (1 + j)
            dc[at] += first
            if j + 1 < reach:
                dc[at + step] += second
            if j + 2 < reach:
                dc[at + 2 * step] += third
    return value


@compiled
def margins_of(distance, scratch, theta, shift):
    """distance <- margins."""
    for i in range(len(distance)):
        y = scratch[D + i]
        distance[i] += theta * log64(y / (1.0 - scratch[i] * y)) + shift


@summing
def chains_of(margin, mass, gap, scratch, sign, scale, tau, slope):
    """The sums of the hinges and of chain y; the place of z <- chain."""
    value = of_center = 0.0
    for i in range(len(margin)):
        v, y, z = scratch[i], scratch[D + i], scratch[E + i]
        violation = gap[i] - scale * margin[i]
        far = -abs(violation) / tau
        e = exp64(far if far > -700.0 else -700.0)
        whole = 1.0 + e
        rest = whole - 1.0
        log1p = log64(whole) * (e / rest) if rest > 0.0 else e
        cost = (violation if violation > 0.0 else 0.0) + tau * log1p
        share = (1.0 if violation > 0.0 else e) / whole
        chain = -sign * mass[i] * scale * share / (y * (1.0 - v * y))
        value += mass[i] * cost
        of_center += chain * y
        slope[i] = sign * chain * (y - v * z)
        scratch[E + i] = chain
    return value, of_center


@compiled
def add_direct(count, classes, g):
    real, where, slope = g.dtype.type, borrowed(classes.where), borrowed(classes.slope)
    for j in range(count):
        g[where[j]] += real(slope[j])


@compiled
def correlate(dc, c, end, window, terms, series):
    """series[t - 1] <- sum_l dc_l c_{l - t}, t = 1..terms, over the last ``window`` coefficients before ``end``."""
    first = max(end - large.padded(window), terms + 3)
    for t in range(1, terms + 1, 4):
        sums = dots(dc[first:end], c[first - t - 3 : end - t])
        for j in range(min(4, terms + 1 - t)):
            series[t - 1 + j] = sums[3 - j]


@summing
def dots(x, y):
    """Products with y and with y less one, two and three of its first numbers."""
    first = second = third = fourth = 0.0
    for i in range(len(x)):
        first += x[i] * y[i]
        second += x[i] * y[i + 1]
        third += x[i] * y[i + 2]
        fourth += x[i] * y[i + 3]
    return first, second, third, fourth


@compiled
def tail_slopes(series, count, tilt, slopes):
    """slopes[j - 1] <- what w^j has in the gradient of the tail's scores, w being not tilted."""
    factor, largest = tilt, 0.0
    for j in range(count):
        slopes[j, 0] = series[j] * factor
        largest = max(largest, abs(slopes[j, 0]))
        factor *= -tilt
    for j in range(count):  # smaller ones make no difference, but could be denormal
        slopes[j, 0] = slopes[j, 0] if abs(slopes[j, 0]) > 1e-20 * largest else 0.0


@compiled
def add_through(v, where, count, c, dc, at, step, steps, scratch, g):
    """g += what passes through the polynomial for one side of the top group: ``steps`` coefficients from ``at`` on."""
    real = g.dtype.type
    for start in range(0, count, blocks.CACHE_BLOCK):
        part = v[start : min(start + blocks.CACHE_BLOCK, large.padded(count))]
        d, total = scratch[: len(part)], scratch[blocks.CACHE_BLOCK : blocks.CACHE_BLOCK + len(part)]
        d[:], total[:] = 0, 0
        for j in range(0, steps, 4):
            i = at + step * j
            four_steps(
                part, d, total, (c[i], c[i + step], c[i + 2 * step], c[i + 3 * step]),
                (dc[i], dc[i + step], dc[i + 2 * step], dc[i + 3 * step]),
            )  # fmt: skip
        for j in range(min(len(part), count - start)):
            g[where[start + j]] -= real(step * total[j])


@compiled
def four_steps(v, d, total, c, dc):
    """total += sum_j dc_j d_j, d_j = c_j - v d_{j-1}."""
    for i in range(len(v)):
        first = c[0] - v[i] * d[i]
        second = c[1] - v[i] * first
        third = c[2] - v[i] * second
        d[i] = c[3] - v[i] * third
        total[i] += (dc[0] * first + dc[1] * second) + (dc[2] * third + dc[3] * d[i])
