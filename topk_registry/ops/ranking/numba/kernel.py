"""One row of the loss over relaxed rankings, see README.md: a selection of the highest scores, their ranks, and at
masses one pass over all others."""
# pyright: reportCallIssue=false, reportArgumentType=false
# numba's intrinsics are called without their first parameter

import math

import numpy as np

from topk_registry.ops.cpu import blocks, points, select
from topk_registry.ops.cpu.blocks import BLOCK, total_of
from topk_registry.ops.cpu.functions import exp, expm1, log
from topk_registry.ops.cpu.memory import address_of, array, empty, zeros
from topk_registry.ops.cpu.numbers import NO_CLASS, compiled, eps, inlined, summing
from topk_registry.ops.cpu.vectors import nothing, scale_by
from topk_registry.ops.rows.numba.row import kernel_of_row, of_label

KIND, CANDIDATES, K, TAU, COUNT, WEIGHTS = range(6)  # the kernel's numbers; weights are the last
NEURALSORT = 0
ROW_BLOCK = 2 * BLOCK  # classes at a time: each rank is a loop over them
MOST_LABELS = 3  # up to so many classes with mass are ranked one by one, as labels
TIERS = (8,)  # ranks that count for the lowest classes
FEWEST = 8  # ranks that count where the points of equation 10 take their place
FAR = 1e30  # below the candidates: a class that is ruled out, with its cost still a number
LEAST = 1e-280  # chances below are compared by their logarithms
RANGE = 690.0  # exponents up to here have numbers
CUT = 45.0  # e^-45 of a class's largest chance changes nothing in double precision


@kernel_of_row(numbers=WEIGHTS)
def row(s, m, y, mass, b, number, at, room, g):
    count = np.int64(number[COUNT])
    weights = array(address_of(number), WEIGHTS + count, np.float64)[WEIGHTS:]
    kind, candidates, k = np.int64(number[KIND]), min(np.int64(number[CANDIDATES]), len(s)), np.int64(number[K])
    g[:] = 0
    total = total_of(s)
    if total != total or total == np.inf:
        return nothing(g)
    if m is None or y >= 0:
        return at_label(s, y, mass, kind, candidates, k, number[TAU], weights, g)
    if labels_among(m) > MOST_LABELS:
        return at_masses(s, m, kind, candidates, k, number[TAU], weights, g)
    value = 0.0
    for i in range(len(m)):
        if m[i] != 0:
            value += at_label(s, i, np.float64(m[i]), kind, candidates, k, number[TAU], weights, g)
    return value


row_of_label = of_label(row)


@compiled
def labels_among(m):
    """The number of classes with mass."""
    count = 0
    for i in range(len(m)):
        count += m[i] != 0
    return count


@compiled
def at_label(s, y, mass, kind, candidates, k, tau, weights, g):
    """Equation 1 of the label among its candidates; its gradient is added to g."""
    own = np.float64(s[y])
    top, where, size = highest(s, y, candidates - 1)
    if own == -np.inf:
        return np.inf
    if size < k:
        return nothing(g)
    x, place = empty(size + 1), size
    for j in range(size):
        x[j] = (np.float64(top[j]) - np.float64(top[0])) / tau
    while place > 0 and top[place - 1] < s[y]:
        x[place] = x[place - 1]
        place -= 1
    x[place] = (own - np.float64(top[0])) / tau
    slopes, cost = zeros(size + 1), np.nan
    if kind == NEURALSORT:
        cost = at_place(x, place, tau, weights, slopes)
    if cost != cost:
        chances, bands, totals, norms, spread = ranks(x, kind, tau, weights)
        share = zeros(len(weights))
        cost = cost_at(x, spread, norms, place, kind, tau, weights, share)
        for r in range(len(weights)):
            scale_by(chances[r, bands[r, 0] : bands[r, 1]], share[r] / totals[r])
            subtract_at(chances[r], bands[r], place, share[r])
        pull(chances, bands, kind, tau, slopes)
    for i in range(size + 1):
        j = i if i < place else i - 1
        g[y if i == place else where[j]] += mass * slopes[i] / tau
    return mass * cost


@compiled
def at_place(x, place, tau, weights, slopes):
    """Equation 1 of NeuralSort at one place of descending scores, slopes <- its gradient; NaN of too small numbers.

    From one rank to the next an exponential takes the same factor, but for one of the rank. So no rank needs new ones,
    and none is kept.
    """
    m, R, spread = len(x), len(weights) - 1, spread_of(x)
    if out_of_range(x, spread, R):
        return np.nan
    # exponentials and their factors, and the sums of cotangents and of these times the ranks' factors
    e, u, each, factored = empty(m), empty(m), zeros(m), zeros(m)
    chance = of_each = of_factored = 0.0
    if weights[0] > 0:
        for i in range(m):
            e[i] = exp(tau * x[i])
        total = total_of(e)
        chance = weights[0] * e[place] / total
        of_factored = chance * tau
        add_scaled(e, of_factored / total, factored, 0, m)
    _, fades = bests_of(x, spread, R, NEURALSORT)
    first_of_ranks(x, spread, e, u)
    for r in range(1, R + 1):
        total = next_rank(e, u, fades[r]) if r > 1 else total_of(e)
        factor, own = np.float64(m + 1 - 2 * r), weights[r] * e[place] / total
        chance += own
        of_each += own
        of_factored += own * factor
        add_twice(e, own / total, own / total * factor, each, factored, 0, m)
    if not chance > LEAST:
        return np.nan
    each[place] -= of_each
    factored[place] -= of_factored
    for i in range(m):
        each[i] /= chance
        slopes[i] = factored[i] / chance
    pull_spread(each, slopes)
    return -math.log(chance)


@compiled
def spread_of(x):
    """sum_j |x_i - x_j| of descending numbers, from step to step, so that no large sums cancel."""
    m, spread, below = len(x), zeros(len(x)), 0.0
    for j in range(1, m):
        spread[j] += spread[j - 1] + j * (x[j - 1] - x[j])
    for j in range(m - 2, -1, -1):
        below += (m - 1 - j) * (x[j] - x[j + 1])
        spread[j] += below
    return spread


@compiled
def out_of_range(x, spread, R):
    """Whether exponentials of NeuralSort's first R ranks are too small to go on from rank to rank.

    The smallest are the last one of the first rank and the first one of the last rank.
    """
    m, last = len(x), max(R, 1) - 1
    of_first = (m - 1) * (x[0] - x[m - 1]) - spread[0] + spread[m - 1]
    of_last = (m - 1 - 2 * last) * (x[last] - x[0]) - spread[last] + spread[0]
    return not (of_first < RANGE and of_last < RANGE and 2 * (x[0] - x[m - 1]) < RANGE)


@compiled
def bests_of(x, spread, R, kind):
    """Of ranks 1 to R: the logit of the class that suits each, and NeuralSort's factor of all exponentials that keeps
    them relative to it when they go on from the rank before."""
    best, fade = zeros(R + 1), blocks.ones(R + 1, np.float64)
    for r in range(1, R + 1):
        best[r] = logit(x, spread, r - 1, r, kind, 1.0)
    for r in range(2, R + 1):
        fade[r] = exp(best[r - 1] - best[r])
    return best, fade


@compiled
def first_of_ranks(x, spread, e, u):
    """e <- the exponentials of the first rank relative to the best, u <- what they are multiplied by for the next."""
    factor = np.float64(len(x) - 1)
    best = factor * x[0] - spread[0]
    for i in range(len(x)):
        e[i] = exp(factor * x[i] - spread[i] - best)
    for i in range(len(x)):
        u[i] = exp(-2.0 * x[i])


@compiled
def next_rank(e, u, factor):
    """e <- the exponentials of the next rank; return their sum."""
    for i in range(len(e)):
        e[i] *= u[i] * factor
    return total_of(e)


@inlined
def classes(first, last):
    """The range of classes in unsigned numbers, which index without a check for negative ones; a slice costs more."""
    return range(np.uint64(first), np.uint64(last))


@compiled
def add_scaled(e, factor, out, first, last):
    for i in classes(first, last):
        out[i] += factor * e[i]


@compiled
def add_twice(e, factor, other, out, second, first, last):
    for i in classes(first, last):
        out[i] += factor * e[i]
        second[i] += other * e[i]


@inlined
def logit(x, spread, i, r, kind, tau):
    """The logit of a class for softmax, or for a rank from 1 on, by equations 2 and 3."""
    if r == 0:
        return tau * x[i]
    if kind == NEURALSORT:
        return np.float64(len(x) + 1 - 2 * r) * x[i] - spread[i]
    return -abs(x[i] - x[r - 1])


@compiled
def cost_at(x, spread, norms, i, kind, tau, weights, share):
    """Equation 1 of the class i, and what each rank contributes to its sum."""
    best, total = -np.inf, 0.0
    for r in range(len(weights)):
        if weights[r] > 0:
            share[r] = logit(x, spread, i, r, kind, tau) - norms[r] + math.log(weights[r])
            best = max(best, share[r])
    for r in range(len(weights)):
        share[r] = math.exp(share[r] - best) if weights[r] > 0 else 0.0
        total += share[r]
    scale_by(share, 1 / total)
    return -best - math.log(total)


@compiled
def highest(s, skip, count):
    """The ``count`` highest scores, their classes, and how many of them are not ruled out."""
    top, where = empty(count, s.dtype), zeros(count, np.int64)
    if count > 0:
        select.largest(s, skip, top, where, select.room(len(s), count, s.dtype))
    size = count
    while size > 0 and top[size - 1] == -np.inf:
        size -= 1
    return top, where, size


@compiled
def ranks(x, kind, tau, weights):
    """Exponentials of softmax and of the ranks [R + 1, m], of descending scores x over tau; the bands of classes
    [R + 1, 2] that have any, the sums [R + 1] that make chances of them, the logarithms of the sums of exponentials of
    logits [R + 1], and the spread of x [m].

    The exponentials of a softmax that does not count are 0. From one rank to the next those of NeuralSort take the same
    factor, but for one of the rank: only classes that are new in a band need exponentials.
    """
    m, R = len(x), len(weights) - 1
    chances, totals, norms = zeros((R + 1, m)), blocks.ones(R + 1, np.float64), zeros(R + 1)
    spread, u = spread_of(x), empty(m)
    bests, fades = bests_of(x, spread, R, kind)
    bests[0] = logit(x, spread, 0, 0, kind, tau)
    bands = zeros((R + 1, 2), np.int64)
    bands[:, 1] = m
    if kind != NEURALSORT or out_of_range(x, spread, R):
        set_bands(x, spread, bests, kind, weights, bands)
    in_steps = kind == NEURALSORT and 2 * (x[0] - x[m - 1]) < RANGE
    if in_steps:
        for i in range(m):
            u[i] = exp(-2.0 * x[i])
    for r in range(R + 1):
        if r == 0 and weights[r] == 0:
            continue
        first, last, best, fade = bands[r, 0], bands[r, 1], bests[r], fades[r]
        chance, start = chances[r], first
        if in_steps and r > 1:
            start = max(first, bands[r - 1, 1])
            before = chances[r - 1]
            for i in classes(first, start):
                chance[i] = before[i] * (u[i] * fade)
        for i in classes(start, last):
            chance[i] = exp(logit(x, spread, i, r, kind, tau) - best)
        totals[r] = total_of(chance[first:last])
        norms[r] = best + math.log(totals[r])
    return chances, bands, totals, norms, spread


@compiled
def set_bands(x, spread, bests, kind, weights, bands):
    """bands [R + 1, 2] <- the first class and the one after the last that have a chance of each rank, of descending
    scores.

    Chances fall on both sides of the class that suits a rank. One is left out where it has a number no more, or where
    that of another rank makes it nothing: of its own rank, or of the last one for a class below.
    """
    m, R, first, last = len(x), len(weights) - 1, 0, 0
    cut = CUT + math.log(weights[min(R, 1)] / weights[R])  # the first rank counts most, and the last one least
    for r in range(1, R + 1):
        last = max(last, r)
        while bests[r] - logit(x, spread, first, r, kind, 1.0) > cut:
            first += 1
        while last < m:
            own = bests[R] - logit(x, spread, last, R, kind, 1.0) if last >= R else 0.0
            if bests[r] - logit(x, spread, last, r, kind, 1.0) > min(own + cut, RANGE):
                break
            last += 1
        bands[r, 0], bands[r, 1] = first, last


@compiled
def subtract_at(row, band, place, share):
    """Subtract a share at a place, which the band then holds."""
    if share > 0:
        row[place] -= share
        band[0], band[1] = min(band[0], place), max(band[1], place + 1)


@compiled
def pull(cotangents, bands, kind, tau, slopes):
    """Add the gradient to x of the cotangents of the ranks' logits [R + 1, m], which are in order of descending x and 0
    but for the bands."""
    R, m = len(cotangents) - 1, len(slopes)
    for i in range(m):
        slopes[i] += cotangents[0, i] * tau
    if kind == NEURALSORT:
        each = zeros(m)
        for r in range(1, R + 1):
            add_twice(cotangents[r], 1.0, np.float64(m + 1 - 2 * r), each, slopes, bands[r, 0], bands[r, 1])
        pull_spread(each, slopes)
        return
    for r in range(1, R + 1):
        first, last = bands[r]
        before, after = cotangents[r, first : r - 1], cotangents[r, r:last]
        slopes[r - 1] += total_of(before) - total_of(after)
        for i in range(len(before)):
            slopes[first + i] -= before[i]
        later = slopes[r:]
        for i in range(len(after)):
            later[i] += after[i]


@compiled
def pull_spread(each, slopes):
    """Add the gradient of minus the spread, times ``each``."""
    m, total, above = len(each), total_of(each), 0.0
    for i in range(m):
        below = total - above - each[i]
        slopes[i] -= (m - 1 - 2 * i) * each[i] + below - above
        above += each[i]


@compiled
def at_masses(s, m, kind, candidates, k, tau, weights, g):
    """As :func:`at_label`, of every class: the highest ones share their ranks, all others the log sums of their rivals,
    by equations 4 and 5."""
    top, where, size = highest(s, NO_CLASS, candidates)
    if size <= k:
        return nothing(g)
    x, mass, slopes = empty(size), empty(size), zeros(size)
    for j in range(size):
        x[j] = (np.float64(top[j]) - np.float64(top[0])) / tau
    for j in range(size):
        mass[j], m[where[j]] = m[where[j]], 0
    chances, bands, totals, norms, spread = ranks(x, kind, tau, weights)
    value, sums, rivals = 0.0, zeros(len(weights)), blocks.ones(len(weights), np.float64)
    if size < candidates:  # all others are ruled out, and only that they have no mass matters
        value = np.inf if labels_among(m) > 0 else 0.0
    elif size < len(s):
        value = of_others(s, m, x, top[size - 2], kind, tau, weights, chances, totals, norms, rivals, sums, slopes, g)
    value += of_highest(x, mass, kind, tau, weights, chances, bands, totals, norms, spread, rivals, sums, slopes)
    for j in range(size):
        g[where[j]] = slopes[j] / tau
    return value


@compiled
def of_highest(x, mass, kind, tau, weights, chances, bands, totals, norms, spread, rivals, sums, slopes):
    """The cost of the candidates x with these masses; their gradient is added to ``slopes``, and that of the offsets of
    all others, whose slopes are ``sums``, by equation 7. It uses up the memory of :func:`ranks`."""
    m, value, total, rare = len(x), 0.0, zeros(len(x)), 0
    for r in range(len(weights)):
        add_scaled(chances[r], weights[r] / totals[r], total, bands[r, 0], bands[r, 1])
    where = empty(m, np.int64)
    for i in range(m):
        if mass[i] == 0:
            total[i] = 0.0  # becomes the mass over the total
        elif total[i] > LEAST:
            value -= mass[i] * math.log(total[i])
            total[i] = mass[i] / total[i]
        else:  # chances that round to nothing: by their logarithms
            total[i], where[rare] = 0.0, i
            rare += 1
    share = zeros((rare, len(weights)))
    for j in range(rare):
        value += mass[where[j]] * cost_at(x, spread, norms, where[j], kind, tau, weights, share[j])
        scale_by(share[j], mass[where[j]])
    for r in range(len(weights)):
        row, first, last, scale = chances[r], bands[r, 0], bands[r, 1], 1 / totals[r]
        pulled = weights[r] * scale * product_of(row, total, first, last)
        for j in range(rare):
            pulled += share[j, r]
        pulled, weight, lowest = scale * pulled + sums[r] / rivals[r], scale * weights[r], row[m - 1]
        for i in classes(first, last):
            row[i] *= pulled - weight * total[i]
        row[m - 1] -= lowest * sums[r] / rivals[r]
        for j in range(rare):
            subtract_at(row, bands[r], where[j], share[j, r])
    pull(chances, bands, kind, tau, slopes)
    return value


@summing
def product_of(x, y, first, last):
    """The scalar product over a band."""
    total = 0.0
    for i in classes(first, last):
        total += x[i] * y[i]
    return total


@compiled
def of_others(s, m, x, low, kind, tau, weights, chances, totals, norms, rivals, sums, slopes, g):
    """The cost of the classes with mass below the rivals, which are x but for the last, and their gradient.

    ``low`` is the score of the lowest rival. ``rivals`` <- the sums of their exponentials [R + 1], ``sums`` <- the
    slopes of the offsets [R + 1]; what of these is not of logits is added to ``slopes``.
    """
    R, count = len(weights) - 1, len(x) - 1
    offsets, steps, of_all = zeros(R + 1), blocks.ones(R + 1, np.float64), 0.0
    for j in range(count):
        of_all += x[j] - x[count - 1]
    for r in range(R + 1):
        # the best of a rank is a rival, of exponential 1
        rivals[r] = totals[r] - chances[r, count] if r > 0 or weights[0] > 0 else 1.0
        norm = norms[r] + math.log(rivals[r] / totals[r])
        if r == 0:
            offsets[r], steps[r] = norm - tau * x[count - 1], tau
        elif kind == NEURALSORT:
            steps[r] = 2 * (count + 1 - r) - 1
            offsets[r] = norm - x[count] + of_all - (count + 1 - 2 * r) * x[count - 1]
        else:
            offsets[r] = norm + x[r - 1] - x[count - 1]
    value, counting = np.nan, ranks_that_count(offsets, steps, weights, s.itemsize)
    if s.itemsize == 4 and counting >= FEWEST and weights[0] == 0:
        value = cost_by_points(s, m, low, tau, offsets, steps, weights, counting, sums, g)
    if value != value:
        value = cost_by_ranks(s, m, low, tau, offsets, steps, weights, counting, sums, g)
    all_sums = 0.0
    for r in range(1, R + 1):
        all_sums += sums[r]
    for j in range(count):
        slopes[j] += all_sums if kind == NEURALSORT else sums[j + 1] if j < R else 0.0
    if kind == NEURALSORT:
        slopes[count] -= all_sums
    return value


@compiled
def cost_by_points(s, m, low, tau, offsets, steps, weights, last, sums, g):
    """The cost of all classes below the rivals, of which the ``last`` ranks count, by cost and slope at a few points:
    equation 10. NaN, with nothing added to ``sums``, where these are not smooth enough."""
    R, real, value, count = len(weights) - 1, s.dtype.type, 0.0, points.IN_DOUBLE
    at, below, slope = points.memory(count, s.dtype), empty(count), empty(count)
    numbers, parts = empty((5, count)), empty((R + 1, count))
    largest = 1 - math.exp(-farthest_of(s, low, real(1 / tau)))
    to_z = points.place(largest, at.v)
    for j in range(count):
        below[j] = -math.log1p(-at.v[j])
    best, total = chances_of(below, offsets, steps, weights, last, numbers, parts, slope)
    for j in range(count):
        best[j] -= math.log(total[j]) + offsets[R] + steps[R] * below[j]
        total[j] = 1 / total[j]
    for r in range(R - last + 1, R + 1):
        slopes_of(total, parts[r], steps[r], slope)
    c, of_slope = at.c[:count], at.c[count:]
    if not (fits(best, at.terms, c) and fits(slope, at.terms, of_slope)):
        return np.nan
    length = min(ROW_BLOCK, len(s))
    part, weight = empty(length, s.dtype), empty(length, s.dtype)
    points.start(at)
    for start in range(0, len(s), ROW_BLOCK):
        scores, mass = s[start : start + ROW_BLOCK], m[start : start + ROW_BLOCK]
        value += cost_between(
            scores, mass, low, real(1 / tau), real(offsets[R]), real(steps[R]), real(largest), real(to_z), at.c,
            part[: len(scores)], weight[: len(scores)], g[start : start + ROW_BLOCK],
        )  # fmt: skip
        points.add(part[: len(scores)], weight[: len(scores)], to_z, at)
    points.finish(at)
    for j in range(count):
        at.weights[j] *= total[j]
    for r in range(R - last + 1, R + 1):
        sums[r] += product_of(at.weights, parts[r], 0, count)
    return value


@compiled
def fits(values, terms, c):
    """Fit a polynomial to values at the points; return whether its last terms are below the rounding of ``c``."""
    points.fit(values, terms, c)
    last, size = len(c) - 1, max(abs(terms[0]), 1.0)
    return abs(terms[last]) + abs(terms[last - 1]) <= 0.5 * eps(c.dtype) * size


@summing
def farthest_of(s, low, scale):
    """How far the lowest class that is not ruled out is below ``low``, over tau."""
    farthest = type(scale)(0)
    for i in range(len(s)):
        d = fallen(s[i], low, scale)
        d = d if d < type(scale)(FAR) else farthest
        farthest = d if d > farthest else farthest
    return np.float64(farthest)


@summing
def cost_between(s, m, low, scale, offset, step, largest, to_z, c, part, mass, g):
    """The masses times the costs of a block, added up; ``part`` <- 1 - e^-d of each class, g <- its gradient."""
    none, far, count = type(scale)(0), type(scale)(FAR), points.IN_DOUBLE
    value = none
    for i in range(len(s)):
        d, share = fallen(s[i], low, scale), m[i]
        near = -expm1(-d)
        near = near if near < largest else largest
        z, cost, slope = to_z * near - type(scale)(1), c[count - 1], c[2 * count - 1]
        for j in range(count - 2, -1, -1):
            cost = cost * z + c[j]
            slope = slope * z + c[count + j]
        cost += offset + step * d
        cost = cost if d < far else type(scale)(np.inf)
        value += share * cost if share != none else none
        slope = slope if d < far else none
        g[i] = -scale * (share * slope)
        part[i], mass[i] = near, share
    return np.float64(value)


@compiled
def cost_by_ranks(s, m, low, tau, offsets, steps, weights, most, sums, g):
    """The cost of all classes below the rivals, of which the ``most`` last ranks count, rank by rank."""
    R, real, value, nearest = len(weights) - 1, s.dtype.type, 0.0, np.inf
    length, scale = min(ROW_BLOCK, len(s)), real(-1 / tau)
    where, below = empty(len(s), np.int64), empty(length, s.dtype)
    numbers, parts = empty((7, length), s.dtype), empty((R + 1, length), s.dtype)
    for tier in range(len(TIERS) + 1):
        # the classes between two distances, from the lowest ones on: for those few ranks count
        last = min(TIERS[tier], most) if tier < len(TIERS) else most
        farthest, nearest = nearest, reach(offsets, steps, weights, last, most, s.itemsize)
        some = classes_between(s, m, low, real(1 / tau), nearest, farthest, where)
        for start in range(0, some, ROW_BLOCK):
            places = where[start : min(start + ROW_BLOCK, some)]
            falls, mass, slope = below[: len(places)], numbers[5, : len(places)], numbers[6, : len(places)]
            for j in range(len(places)):
                falls[j], mass[j] = s[places[j]], m[places[j]]
            for j in range(len(places)):
                falls[j] = fallen(falls[j], low, real(1 / tau))
            value += cost_of(falls, mass, offsets, steps, weights, last, numbers, parts, slope, sums)
            for j in range(len(places)):
                g[places[j]] = scale * slope[j]
        if last == most:
            break
    return value


@compiled
def least_offset(steps, weights, itemsize):
    """The logarithm of a rank's chance beside the last one's below which all such ranks add up to less than half a
    rounding of value and slope."""
    R = len(weights) - 1
    return math.log(2.0 ** (-26 if itemsize == 4 else -55) * weights[R] * steps[R] / (steps[1] * R))


@compiled
def ranks_that_count(offsets, steps, weights, itemsize):
    """How many of the last ranks count for a class just below the rivals, and so for all others, by equation 6."""
    R, last = len(weights) - 1, 1
    if R == 0:
        return 1
    least = least_offset(steps, weights, itemsize)
    for j in range(1, R):
        if offsets[R] - offsets[R - j] > least:
            last = j + 1
    return last


@compiled
def reach(offsets, steps, weights, last, most, itemsize):
    """How far below the rivals a class is at least of which the ``last`` ranks alone count, of ``most``; 0 where these
    are all, and no class is so low where the ranks' steps are the same."""
    R = len(weights) - 1
    if last == most:
        return 0.0
    step = steps[R - 1] - steps[R]
    if step <= 0:
        return np.inf
    least, nearest = least_offset(steps, weights, itemsize), 0.0
    for j in range(last, most):
        nearest = max(nearest, (offsets[R] - offsets[R - j] - least) / (step * j))
    return nearest


@compiled
def classes_between(s, m, low, scale, nearest, farthest, where):
    """List the classes with mass that are from ``nearest`` to below ``farthest`` under ``low``, over tau."""
    some = 0
    if nearest == 0 and farthest == np.inf:
        for i in range(len(s)):
            where[some] = i
            some += m[i] != 0
        return some
    for i in range(len(s)):
        d = np.float64(fallen(s[i], low, scale))
        where[some] = i
        some += (m[i] != 0) & (d >= nearest) & (d < farthest)
    return some


@inlined
def fallen(score, low, scale):
    """How far a score is below ``low``, over tau; 0 above it."""
    d = (low - score) * scale
    far, zero = type(d)(FAR), type(d)(0)
    d = d if d < far else far
    return d if d > zero else zero


@compiled
def cost_of(below, mass, offsets, steps, weights, last, numbers, parts, slope, sums):
    """The cost of a block of classes of which the ``last`` ranks count; ``slope`` <- their slopes, and the slopes of
    the offsets are added to ``sums``."""
    real, R = below.dtype.type, len(weights) - 1
    best, total = chances_of(below, offsets, steps, weights, last, numbers, parts, slope)
    value = expected(mass, best, total, below, real(FAR))
    for r in range(R + 1):
        if weights[r] > 0 and (r == 0 or r > R - last):
            sums[r] += slopes_of(total, parts[r, : len(below)], real(steps[r]), slope)
    for i in range(len(below)):
        slope[i] = slope[i] if below[i] < real(FAR) else real(0)
    return value


@compiled
def chances_of(below, offsets, steps, weights, last, numbers, parts, slope):
    """Return ``best`` and the sum of the weighted chances of ``last`` ranks; ``parts`` <- those of each rank with its
    slope, see :func:`add_rank`, and ``slope`` <- 0.

    Chances are relative to e^-best, where best is about the cost. A chance of rank r relative to the last rank R is
    exp(offset_R - offset_r) u^(R - r), u = exp((step_R - step_r) below / (R - r)) being the same for all r: so a class
    costs few exponentials however many ranks count.
    """
    real, n, R = below.dtype.type, len(below), len(weights) - 1
    best, power, unit, total, softmax = numbers[0, :n], numbers[1, :n], numbers[2, :n], numbers[3, :n], numbers[4, :n]
    relative_to_best(below, offsets, steps, weights, best, power, softmax)
    for i in range(n):
        one = exp(-best[i])
        unit[i] = one if one > least_of(below) else real(0)
    total[:], slope[:] = 0, 0
    if weights[0] > 0:
        add_rank(softmax, real(1 / weights[0]), real(weights[0]), unit, parts[0, :n], total)
    if R > 0:
        least = least_of(below)
        fade, u = real(steps[R] - steps[R - 1]) if R > 1 else real(0), softmax  # softmax has been added
        for i in range(n):
            u[i] = exp(fade * below[i])
        for r in range(R, R - last, -1):
            factor = real(math.exp(offsets[R] - offsets[r]))
            factor = factor if factor > least else real(0)
            add_rank(power, factor, real(weights[r]), unit, parts[r, :n], total)
            for i in range(n):
                fallen = power[i] * u[i]
                power[i] = fallen if fallen > least else real(0)
    return best, total


@inlined
def least_of(chances):
    """Smaller chances change nothing beside 1, and so the product of two is no denormal number."""
    return chances.dtype.type(1e-18 if chances.itemsize == 4 else 1e-100)


@compiled
def relative_to_best(below, offsets, steps, weights, best, power, softmax):
    """The exponent ``best``, and the chances of the last rank and of softmax times its weight relative to e^-best."""
    R, real = len(weights) - 1, below.dtype.type
    offset, step = real(offsets[R]), real(steps[R])
    if weights[0] == 0:
        for i in range(len(below)):
            best[i] = offset + step * below[i]
            power[i] = 1
        return
    first, slope = real(offsets[0] - math.log(weights[0])), real(steps[0])
    if R == 0:
        for i in range(len(below)):
            best[i] = first + slope * below[i]
            softmax[i] = 1
        return
    for i in range(len(below)):
        t, t_0 = offset + step * below[i], first + slope * below[i]
        best[i] = t if t < t_0 else t_0
        power[i] = exp(best[i] - t)
        softmax[i] = exp(best[i] - t_0)


@compiled
def add_rank(chance, factor, weight, unit, part, total):
    """Add the weight times the chances of a rank to ``total``; ``part`` is the same times 1 - P, the rank's slope."""
    one, none, least = chance.dtype.type(1), chance.dtype.type(0), least_of(chance)
    for i in range(len(chance)):
        q = factor * chance[i]
        q = q if q > least else none
        rest = one / (one + q * unit[i])
        p = weight * q * rest
        part[i] = p * rest
        total[i] += p


@summing
def expected(mass, best, total, below, least):
    """The masses times the costs, added up, infinite where a class that is ruled out has any; total <- mass / total."""
    value, none = 0.0, mass.dtype.type(0)
    for i in range(len(mass)):
        cost = best[i] - log(total[i])
        cost = cost if below[i] < least else mass.dtype.type(np.inf)
        value += np.float64(mass[i] * cost if mass[i] != none else none)
        total[i] = mass[i] / total[i]
    return value


@summing
def slopes_of(share, part, step, slope):
    """The sum of the shares of a rank; slope += step times them."""
    sum_of_shares = share.dtype.type(0)
    for i in range(len(share)):
        h = share[i] * part[i]
        slope[i] += h * step
        sum_of_shares += h
    return np.float64(sum_of_shares)
