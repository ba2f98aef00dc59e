"""The hinges of all classes of one row, weighted, and their gradient, for large k: see "Large k" in README.md."""
# pyright: reportCallIssue=false, reportArgumentType=false

import math
from collections import namedtuple

import numpy as np

from topk_registry.ops.cpu import blocks, points
from topk_registry.ops.cpu.memory import borrowed, empty, zeros
from topk_registry.ops.cpu.numbers import compiled, copy, exp64, log64, summing
from topk_registry.ops.ksubset.numba import groups, large, narrow
from topk_registry.ops.ksubset.numba.hinges import (
    LEAST_TAU,
    LEAST_TERM,
    D,
    E,
    add_moments,
    chains,
    distance,
    horner_twice,
    sum_of_hinges,
)
from topk_registry.ops.ksubset.numba.large_margins import (
    above_c_k,
    add_tail,
    divide_at_points,
    finish,
    gather,
    row_memory,
    split,
    weigh_tail,
)
from topk_registry.ops.ksubset.numba.targets import FEW_CLASSES, gaps_and_gains, holds, masses, one_hinge

# Memory for a row, that of its margins; gaps and gains of the classes, or CACHE_BLOCK equal ones; and of narrow rows
# the expansion and room for its terms.
HingeMemory = namedtuple("HingeMemory", "row alphas gains expansion terms")


@compiled
def hinge_memory(width, n, k, dtype, alpha, tau):
    """Memory for :func:`hinge_rows`, which works on a row at a time; gaps and gains included."""
    row = row_memory(width, n, k, dtype)
    alphas, gains = gaps_and_gains(n, alpha, tau, dtype)
    return HingeMemory(row, alphas, gains, narrow.expand(n, 0, k, row.x.itemsize), zeros((10, narrow.MOST_TERMS + 1)))


@compiled
def hinge_rows(
    s, is_bfloat16, q, labels, shares, uniform, weight, alpha, factor, k, theta, scale, tau, value, out, memory
):  # fmt: skip
    """:func:`topk_registry.ops.ksubset.numba.expected.hinge_rows` for large k."""
    memory = borrowed(memory)
    n, x, w, d = out.shape[1], memory.row.x, memory.row.odds, memory.row.direct
    few, few_mass = empty(FEW_CLASSES, np.int64), empty(FEW_CLASSES)
    terms, tau = memory.terms, max(tau, LEAST_TAU)
    for r in range(len(s)):
        blocks.load(s[r, :n], is_bfloat16, x)
        count = masses(r, q, labels, shares, uniform, weight, factor, memory.row.mass[:n], few, few_mass)
        a, mass = groups.odds_of_largest(x, theta, w)
        size, u = narrow.centred(w, mass, n, memory.expansion, d, terms[0], terms[1])
        if size > 0:
            copy(d, w)
            value[r] = narrow_row(n, size, a, u, count, few, few_mass, alpha, k, theta, scale, tau, memory)
        else:
            value[r] = divided_row(a, mass, count, few, few_mass, alpha, k, theta, scale, tau, memory)
        blocks.store(memory.row.direct, is_bfloat16, out[r])


@compiled
def narrow_row(n, size, a, u, count, few, few_mass, alpha, k, theta, scale, tau, memory):
    """Return the hinge of a narrow row, of ``size`` terms; its gradient goes to memory."""
    expansion, terms, real = memory.expansion, memory.terms, memory.row.x.dtype.type
    x, d, g = memory.row.x, memory.row.odds, memory.row.direct
    a_m, inverse, ratio, of_ratio = terms[1, : size + 1], terms[3, : size + 1], terms[4], terms[5]
    ratio[:] = 0
    of_equal = narrow.ratio_polynomial(a_m, n, k, expansion, terms[2, : size + 1], inverse, ratio[: size + 1])
    shift, total = math.log(u * of_equal), 0.0
    if count < 0:
        total = narrow.hinges(
            x, d, memory.row.mass, memory.alphas, memory.gains, a, size, expansion, of_equal, shift, scale,
            tau, ratio, of_ratio, g, memory.row.scratch,
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
def divided_row(a, mass, count, few, few_mass, alpha, k, theta, scale, tau, memory):
    """Return the hinge of a row whose classes are left out by division; its gradient goes to memory."""
    dc, high, lead = memory.row.dc, memory.row.high.where, len(memory.row.dc) // 2
    x, w, g = memory.row.x, memory.row.odds, memory.row.direct
    real = memory.row.x.dtype.type
    row = split(a, mass, k, theta, memory.row)
    if row.size < 0:
        return np.nan
    massive = gather(row, alpha, count < 0, memory.row.mass, few[: max(count, 0)], few_mass, memory.row)
    dc[lead:] = 0
    if count < 0 and len(alpha) > 1:
        total = tail_hinges(row, k, scale, tau, memory)
    elif count < 0:
        total = tail_of_one_gap(alpha[0], row, k, scale, tau, memory.row)
    else:
        total = 0.0
        blocks.fill(g, real(0))
        for f in range(count):
            i = few[f]
            if few_mass[f] != 0 and not holds(high[: row.higher], i):
                distance, v = np.float64(x[i]) - np.float64(row.kth), np.float64(w[i]) * row.tilt
                cost, slope = one_hinge(
                    distance, np.float64(alpha[i if len(alpha) > 1 else 0]), few_mass[f], v,
                    memory.row.polynomial.up[blocks.FRONT :], row.shift, theta, scale, tau,
                    dc[lead : lead + k + 1],
                )  # fmt: skip
                total += few_mass[f] * cost
                g[i] += real(slope)
    total += high_hinges(massive, row, k, theta, scale, tau, memory.row)
    finish(row, massive, k, memory.row)
    return total


@compiled
def tail_of_one_gap(alpha, row, k, scale, tau, memory):
    """:func:`tail_hinges` where all classes have one gap: what their odds cost is known at the points too."""
    dc, wide, weights, center = memory.dc, memory.wide, memory.points.weights, len(memory.dc) // 2 + k
    x, mass, total = memory.x, memory.mass, 0.0
    for start in range(0, len(x), blocks.CACHE_BLOCK):
        stop = min(start + blocks.CACHE_BLOCK, len(x))
        some, distances = mass_and_distances(x[start:stop], mass[start:stop], row.kth)
        total += some * (alpha - tau * row.shift) + scale * distances
    rest = 1 - math.exp(-alpha / tau)
    of_z = weigh_tail(row, k, memory)
    for m in range(len(weights)):
        v, y = wide[m], wide[D + m]
        last = 1 - rest * (v * y)
        chain = -scale / (last * y)
        total += weights[m] * tau * math.log(last / y)
        wide[m] = chain * (y - v * wide[E + m])
        dc[center] -= weights[m] * chain * y
        weights[m] *= chain
    add_tail(row, of_z, k, memory)
    return total


@summing
def mass_and_distances(scores, mass, kth):
    """The sum of the masses, and that of the masses times how far the scores are below the k-th largest."""
    zero = mass.dtype.type(0)
    total = distances = zero
    for i in range(len(mass)):
        total += mass[i]
        distances += distance(kth, scores[i]) * mass[i] if mass[i] != zero else zero
    return np.float64(total), np.float64(distances)


@compiled
def tail_hinges(row, k, scale, tau, memory):
    """Return the sum of the hinges of all classes but the high ones, weighted by their masses, with its direct gradient
    and that by way of the coefficients; see :func:`topk_registry.ops.ksubset.numba.hinges.tail_hinges`."""
    x, w, mass, g = memory.row.x, memory.row.odds, memory.row.mass, memory.row.direct
    alphas, gains, scratch = memory.alphas, memory.gains, memory.row.scratch
    dc, c, real, total = memory.row.dc, memory.row.points.c, memory.row.x.dtype.type, 0.0
    per_class, center = len(alphas) == len(x), len(memory.row.dc) // 2 + k
    of_z = fit_quotients(row, k, memory.row)
    tilt, shift, scale, tau = real(row.tilt), real(row.shift), real(scale), real(tau)
    points.start(memory.row.points)
    for start in range(0, len(x), blocks.CACHE_BLOCK):
        stop = min(start + blocks.CACHE_BLOCK, len(x))
        at = start if per_class else 0
        odds, share, gap = w[start:stop], mass[start:stop], alphas[at : at + stop - start]
        quotients(odds, tilt, of_z, c, scratch)
        chains(share, gains[at : at + stop - start], scale, scratch, g[start:stop])
        cost, of_last = sum_of_hinges(x[start:stop], share, gap, scratch, row.kth, shift, scale, tau)
        total += cost
        dc[center] -= of_last
        points.add(odds, scratch[E : E + len(odds)], of_z, memory.row.points)
    points.finish(memory.row.points)
    add_moments(memory.row.points.weights, memory.row.points.v, 1.0, dc, center, row.below, LEAST_TERM)
    return total


@compiled
def fit_quotients(row, k, memory):
    """Fit d_{k-1} and e_{k-2} as functions of a class's odds, into ``memory.points.c``; return the scale as
    :func:`divide_at_points`."""
    wide, at, count = memory.wide, memory.points, len(memory.points.v)
    scale = divide_at_points(row, k, memory)
    points.fit(wide[D : D + count], at.terms, at.c[:count])
    points.fit(wide[E : E + count], at.terms, at.c[count:])
    return scale


@compiled
def quotients(w, tilt, scale, c, scratch):
    """v <- tilt w, d <- d_{k-1} and e <- e_{k-2} of each class, by their fits; see :func:`horner_twice`."""
    one, count = w.dtype.type(1), points.count_of(w)
    for i in range(len(w)):
        z, y, e = scale * w[i] - one, c[count - 1], c[2 * count - 1]
        for j in range(count - 2, -1, -1):
            y = y * z + c[j]
            e = e * z + c[count + j]
        scratch[i], scratch[D + i], scratch[E + i] = tilt * w[i], y, e


@compiled
def high_hinges(count, row, k, theta, scale, tau, memory):
    """Return the sum of the hinges of the high classes; their direct gradient goes to ``memory.massive``, that of the
    coefficients is added to ``memory.dc``.

    With y and z from :func:`horner_twice`, v = 1 / odds and d = 1 - v y, the log-odds are -log(y / d) besides the
    class's own; chain = -g / (y d),

        dL/ds = -chain (y - v z),   dL/dc_{k + 1 + j} = chain (-v)^j,   dL/dc_k = -chain y.
    """
    value, classes, dc, wide = 0.0, memory.massive, memory.dc, memory.wide
    c, center = above_c_k(row, memory), len(memory.dc) // 2 + k
    for start in range(0, large.padded(count), blocks.CACHE_BLOCK):
        stop = min(start + blocks.CACHE_BLOCK, large.padded(count))
        v, slope = classes.v[start:stop], classes.slope[start:stop]
        distance, mass = classes.distance[start:stop], classes.mass[start:stop]
        horner_twice(v, c, 1.0, wide)
        margins_of(distance, wide, -theta, theta * row.shift)
        cost, of_center = chains_of(distance, mass, classes.gap[start:stop], wide, scale, tau, slope)
        value += cost
        dc[center] -= of_center
        add_moments(wide[E : E + len(v)], wide[: len(v)], -1.0, dc, center, row.above, LEAST_TERM)
    return value


@compiled
def margins_of(distance, scratch, theta, shift):
    """distance <- margins."""
    for i in range(len(distance)):
        y = scratch[D + i]
        distance[i] += theta * log64(y / (1.0 - scratch[i] * y)) + shift


@summing
def chains_of(margin, mass, gap, scratch, scale, tau, slope):
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
        chain = mass[i] * scale * share / (y * (1.0 - v * y))
        value += mass[i] * cost
        of_center += chain * y
        slope[i] = -chain * (y - v * z)
        scratch[E + i] = chain
    return value, of_center
