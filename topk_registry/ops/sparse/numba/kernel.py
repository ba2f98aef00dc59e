"""One row of the loss over sparse masks, see README.md: a search for each of two thresholds among the scores that can
be in a mask, and a pass for loss and gradient."""
# pyright: reportCallIssue=false, reportArgumentType=false
# numba's intrinsics are called without their first parameter

import numpy as np

from topk_registry.ops.cpu import select
from topk_registry.ops.cpu.blocks import BLOCK, largest_of, total_of
from topk_registry.ops.cpu.masks import places_above
from topk_registry.ops.cpu.memory import address_of, array, borrowed, empty, zeros
from topk_registry.ops.cpu.numbers import compiled, eps, inlined, summing
from topk_registry.ops.cpu.vectors import nothing
from topk_registry.ops.rows.numba.row import kernel_of_row, of_label

K, TAU = range(2)  # the kernel's numbers
LINES = 64  # at least so many lines, the maximum of each of which bounds the k-th largest score
WIDE = 100.0  # so many taus between the scores of a short row do not cost digits
TRIALS = 1200  # an end to the search for a threshold: so often the range of double precision can be halved


@kernel_of_row(numbers=2)
def row(s, m, y, mass, b, number, at, room, g):
    n, space = len(s), address_of(room)
    wide, places = array(space, n, np.float64), array(space, 3 * n, np.int64)
    return loss(s, m, y, mass, np.int64(number[K]), number[TAU], g, (wide, places[n : 2 * n], places[2 * n :]))


row_of_label = of_label(row)


@compiled
def loss(s, m, y, mass, k, tau, g, space):
    """The loss; its gradient is in g. ``space`` is for n numbers in double precision and twice n places."""
    scale, total = 1 / tau, total_of(s)
    if total != total or total == np.inf:
        return nothing(g)
    x, where, origin = candidates(s, k, scale, space)
    if len(x) < k:
        return nothing(g)
    theta = threshold(x, k, -1.0, largest_of(x))
    x, where = above(x, where, theta, space[2])
    if m is None or y >= 0:
        return at_label(s, x, where, theta, origin, y, mass, k, scale, g)
    return at_masses(s, m, x, where, space[2], theta, origin, k, scale, g)


@compiled
def candidates(s, k, scale, space):
    """The scores that can be in a mask of k, less an origin and over tau, their classes, and the origin.

    A mask holds no score further than tau below the k-th largest, which the origin bounds from below."""
    real, (x, where, other) = s.dtype.type, space
    origin = real(lower_bound(s, k, scale, array(address_of(other), 8 * len(other) // s.itemsize, s.dtype)))
    if not abs(origin) < np.inf:
        return x[:0], where[:0], origin
    least = np.float64(origin) - 1 / scale
    count = places_above(s, real(least - eps(s.dtype) * abs(least)), where)  # rounded, one more may be kept
    for j in range(count):
        x[j] = (np.float64(s[where[j]]) - np.float64(origin)) * scale
    return x[:count], where[:count], origin


@compiled
def lower_bound(s, k, scale, space):
    """A finite number that k scores reach, as k of the maxima over every so-many-th score do, or the least score."""
    n, lines = len(s), LINES
    while lines < 2 * k:
        lines *= 2
    if lines > n:
        least = lowest(s)
        if (np.float64(largest_of(s)) - least) * scale < WIDE:
            return least
        reached = select.reached_by(s, k)  # from a score far below, all others are one number
        return reached if reached > -np.inf else least
    maxima = space[:lines]
    select.maxima_of_lines(s, maxima)
    reached = select.reached_by(maxima, k)
    return reached if reached > -np.inf else lowest(s)


@compiled
def lowest(s):
    """The lowest finite score."""
    least = np.inf
    for v in s:
        least = min(least, np.float64(v)) if v > -np.inf else least
    return least


@compiled
def mask_at(x, theta):
    """The sum of the mask at this threshold, how many scores are in it, and how many of these entirely."""
    total, some, whole = 0.0, 0, 0
    for start in range(0, len(x), BLOCK):
        sums = _mask_at(x[start : start + BLOCK], theta)
        total, some, whole = total + sums[0], some + sums[1], whole + sums[2]
    return total, some, whole


@summing
def _mask_at(x, theta):
    total, some, whole = 0.0, 0, 0
    for i in range(len(x)):
        u = x[i] - theta
        v = u if u < 1.0 else 1.0
        total += v if v > 0.0 else 0.0
        some += u > 0.0
        whole += u >= 1.0
    return total, some, whole


@compiled
def threshold(x, k, low, high):
    """theta with sum_i clip(x_i - theta, 0, 1) = k, between ``low`` and ``high``: steps of Newton's, which end at the
    solution once they do not change the classes in the mask."""
    theta, last_some, last_whole = low, -1, -1
    for _ in range(TRIALS):
        total, some, whole = mask_at(x, theta)
        if total >= k:
            low = theta
        else:
            high = theta
        free = some - whole
        step = (total - k) / free if free > 0 else np.inf
        if total == k or theta + step == theta or (some == last_some and whole == last_whole):
            break
        last_some, last_whole = some, whole
        theta += step
        if not low < theta < high:
            theta, last_some = (low + high) / 2, -1
    return theta


@compiled
def above(x, where, theta, kept):
    """The scores above a threshold, and their classes. No mask of k without one class reaches below that of k."""
    count = places_above(x, theta, kept)
    for j in range(count):
        x[j], where[j] = x[kept[j]], where[kept[j]]
    return x[:count], where[:count]


@compiled
def at_label(s, x, where, theta, origin, y, mass, k, scale, g):
    """Equations 3 to 5, with the scores above theta."""
    own, high = (np.float64(s[y]) - np.float64(origin)) * scale, largest_of(x)
    g[:] = 0
    if own - theta >= 1:
        return 0.0
    value, held = gain_of_label(own - theta), without(x, own, k - 1, theta, high)
    value += gains(x, theta, held - theta, mass) - gain(own - theta, held - theta)  # the label's own term is the first
    for j in range(len(x)):
        g[where[j]] = x[j]
    g[y] = mass * (clipped(own - theta) - 1)
    return mass * value / scale


@compiled
def without(x, own, k, low, high):
    """The threshold of the mask of k of the others, if one of them is left out; x is restored."""
    if k == 0:
        return high
    for i in range(len(x)):
        if x[i] == own:  # which of several equal ones makes no difference
            x[i] = -np.inf
            threshold_of_others = threshold(x, k, low, high)
            x[i] = own
            return threshold_of_others
    return threshold(x, k, low, high)


@compiled
def clipped(u):
    return min(max(u, 0.0), 1.0)


@compiled
def gain_of_label(u):
    """h(u) - (u - 1/2), the label's term, for u below 1."""
    return 0.5 * (1 - u) * (1 - u) if u > 0 else 0.5 - u


@compiled
def gain(u, delta):
    """h(u) - h(u - delta) - delta h'(u - delta): 0 where both are above 1, or both below 0."""
    above, here, there = u - 1, clipped(u), clipped(u - delta)
    # h(u) = c^2 / 2 + (u - 1)_+, c = clip(u, 0, 1), and v_+ - (v - delta)_+ is v between 0 and delta
    rest = min(max(above, 0.0), delta)
    return rest + 0.5 * (here - there) * (here + there) - delta * there


@summing
def gains(x, theta, delta, mass):
    """The sum of :func:`gain`; x <- the difference of the masks times the mass."""
    total = 0.0
    for i in range(len(x)):
        u = x[i] - theta
        v, above = u - delta, u - 1.0
        here, there = (u if u < 1.0 else 1.0), (v if v < 1.0 else 1.0)
        here, there = (here if here > 0.0 else 0.0), (there if there > 0.0 else 0.0)
        rest = above if above > 0.0 else 0.0
        rest = rest if rest < delta else delta
        total += rest + (0.5 * (here - there) * (here + there) - delta * there)
        x[i] = mass * (here - there)
    return total


@compiled
def at_masses(s, m, x, where, other, theta, origin, k, scale, g):
    """As :func:`at_label`, of every class: those outside the mask of k - 1 share one threshold, the others have their
    own."""
    high, count = largest_of(x), len(x)
    held, some = threshold(x, k - 1, theta, high) if k > 1 else high, False
    inside, own, u = empty(count), zeros(count), empty(count)
    for j in range(count):
        inside[j], m[where[j]] = np.float64(m[where[j]]), 0
    shared, ahead = 0.0, 0.0
    for start in range(0, len(s), BLOCK):
        stop = start + BLOCK
        sums = outside(s[start:stop], m[start:stop], origin, g[start:stop])
        shared, ahead = shared + np.float64(sums[0]), ahead + np.float64(sums[1])
    value = shared * (0.5 + theta) + ahead * scale
    for j in range(count):
        u[j] = x[j] - theta
        if u[j] >= 1:  # decided once, for it may be rounded otherwise elsewhere
            inside[j] = 0.0
        elif x[j] > held:
            own[j], some = inside[j], some or inside[j] != 0
        elif inside[j] != 0:
            shared += inside[j]
            value += inside[j] * (gain_of_label(u[j]) - gain(u[j], held - theta))
    value += shared * gains(x, theta, held - theta, shared)
    for j in range(count):
        g[where[j]] = x[j] - inside[j]
    if some and k > 1:  # a mask of one class has no other inside
        value += add_each(s, u, own, where, other, k, g)
    return value / scale


@compiled
def add_each(s, u, mass, where, places, k, g):
    """The cost of the classes with mass in the mask of k; their part of the gradient is added to g."""
    size = len(u)
    order, numbers = empty(size, np.int64), empty(2 * size + 64, s.dtype)  # the order of scores is that of u
    for j in range(size):
        numbers[j], places[j] = s[where[j]], j
    select.in_order(numbers, places, size, numbers[size + 64 :], order)
    rising = empty((9, size + 1))
    for j in range(size):
        i = order[size - 1 - j]
        rising[0, j], rising[1, j] = u[i], mass[i]
    value = of_each(rising, size, k)
    for j in range(size):
        g[where[order[size - 1 - j]]] += rising[2, j]
    return value


@summing
def outside(s, m, origin, g):
    """The sums of the masses of classes outside of any mask, and of these times how far they are below the origin;
    g <- their own part of the gradient."""
    zero = m.dtype.type(0)
    shared = ahead = zero
    for i in range(len(s)):
        shared += m[i]
        ahead += m[i] * _distance(origin, s[i]) if m[i] != zero else zero
        g[i] = -m[i]
    return shared, ahead


@inlined
def _distance(a, score):
    return a - score  # exact, so not to be reordered with other sums


@compiled
def of_each(rising, size, k):
    """The cost of the classes with mass, of those in the mask of k, from u ascending and their masses in the first two
    rows of ``rising``; the third <- their part of the gradient. Equations 3, 4 and 6 to 8."""
    rising = borrowed(rising)
    u, mass, slopes, sums, halves = rising[0, :size], rising[1], rising[2], rising[3], rising[4]
    above, deltas, masses, moments = rising[5], rising[6], rising[7], rising[8]
    sums[0] = halves[0] = above[0] = masses[0] = moments[0] = 0
    for j in range(size):
        over = max(u[j] - 1, 0.0)
        sums[j + 1] = sums[j] + min(u[j], 2.0)  # none above 2 is ever less than whole
        halves[j + 1] = halves[j] + 0.5 * min(u[j], 1.0) ** 2
        above[j + 1] = above[j] + 0.5 * min(over, 1.0) ** 2
    value, count, low, high, delta = 0.0, 0, 0, 0, 0.0
    while high < size and u[high] < 1:
        high += 1
    for j in range(high - 1, -1, -1):
        if mass[j] == 0:
            continue
        while True:  # the window low to high, of those that are neither out nor whole, only moves upwards
            inside = j >= low
            free = high - low - inside
            first = u[low] if low < high else np.inf
            last = u[high] - 1 if high < size else np.inf
            if free == 0:  # the others are whole, k - 1 of them
                break
            shift = (sums[high] - sums[low] - (u[j] if inside else 0.0) + (size - high) - (k - 1)) / free
            if shift <= first and shift <= last:
                delta = max(shift, delta)
                break
            delta = max(min(first, last), delta)
            low, high = low + (first <= last), high + (last < first)
        total = halves[low] + (high - low) * 0.5 * delta * delta - (above[high] - above[low])
        value += mass[j] * (gain_of_label(u[j]) + total - gain(u[j], delta))
        slopes[j] = mass[j] * (u[j] - clipped(u[j]) + clipped(u[j] - delta))
        deltas[count] = delta
        masses[count + 1], moments[count + 1] = masses[count] + mass[j], moments[count] + mass[j] * delta
        count += 1
    out, whole = 0, 0
    for i in range(size):
        while out < count and deltas[out] < u[i]:
            out += 1
        while whole < count and deltas[whole] <= u[i] - 1:
            whole += 1
        held = masses[whole] + u[i] * (masses[out] - masses[whole]) - (moments[out] - moments[whole])
        own = slopes[i] if u[i] < 1 and mass[i] != 0 else 0.0
        slopes[i] = own + masses[count] * clipped(u[i]) - held
    return value
