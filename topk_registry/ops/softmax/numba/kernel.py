"""One row of the softmax family, see README.md: a few passes over scores that stay in the cache."""
# pyright: reportCallIssue=false, reportArgumentType=false
# numba's intrinsics are called without their first parameter

import numpy as np

from topk_registry.ops.cpu.blocks import BLOCK, largest_of, total_of
from topk_registry.ops.cpu.functions import log
from topk_registry.ops.cpu.memory import address_of, array, empty, zeros
from topk_registry.ops.cpu.numbers import compiled, merged, summing
from topk_registry.ops.cpu.vectors import exponentials, place_of_largest, probabilities_of, scale_by
from topk_registry.ops.rows.numba.curves import FACTOR, LOG_Z, MOST, NUMBERS, SHARE, SKIPPED, call_curve, call_softmax
from topk_registry.ops.rows.numba.row import ROOMS, kernel_of_row, of_label

SCALE, OTHERS, PARAMETERS = range(3)  # the kernel's numbers; the curve's follow
CURVE_AT, CURVE_64, OWN, OWN_64, SHIFT = range(5)  # addresses, in the precision of the kernel and in double


@kernel_of_row(numbers=PARAMETERS + NUMBERS + 1, operands=5)
def row(s, m, y, mass, b, number, at, room, g):
    return of_scores(shifted(s, at, room), m, y, mass, number, at, (at[OWN], at[OWN_64]), room, g)


row_of_label = of_label(row)  # of curves without others


@merged
def of_scores(s, m, y, mass, number, at, owns, room, g):
    """The loss of scores that are shifted; ``owns`` are the addresses of a number for each class."""
    scale, parameters = s.dtype.type(number[SCALE]), address_of(number[PARAMETERS:])
    if m is None or (y >= 0 and number[OTHERS] == 0):
        return at_label(s, y, mass, scale, at[CURVE_64], parameters, owns[1], g)
    if y >= 0:
        m[:] = 0
        m[y] = mass
    if at[CURVE_AT] == 0:
        return cross_entropy(s, m, mass, scale, g)
    return at_masses(s, m, mass, scale, (at[CURVE_AT], at[CURVE_64]), parameters, owns, g, room[: len(s)])


@merged
def shifted(s, at, room):
    """The scores with the shift of each class, if there is one."""
    n = len(s)
    return with_shift(s, array(at[SHIFT], n, s.dtype), room[(ROOMS - 1) * n : ROOMS * n]) if at[SHIFT] != 0 else s


@compiled
def with_shift(s, shift, out):
    for i in range(len(s)):
        out[i] = s[i] + shift[i]
    return out


@compiled
def at_label(s, y, mass, scale, curve, parameters, own, g):
    """Equations 1 and 2: with the label's log-odds, which are taken against the others alone."""
    real = s.dtype.type
    a, rest = others(s, y, scale, g)
    log_odds = (np.float64(s[y]) - np.float64(a)) * scale - (log(rest) if rest > 0 or rest != rest else -np.inf)
    value, slope = on_curve(log_odds, mass, mass, y, curve, parameters, own)
    share = real(slope * scale / rest) if rest != 0 else real(0)
    scale_by(g, -share)
    g[y] = slope * scale
    return value


@compiled
def others(s, c, scale, e):
    """The largest score a without class c, e <- exp(scale (s - a)), 0 for c itself, and the sum of e."""
    a = max(largest_of(s[:c]), largest_of(s[c + 1 :]))
    a = a if a > -np.inf or a != a else s.dtype.type(0)
    rest = exponentials(s[:c], a, scale, e[:c]) + exponentials(s[c + 1 :], a, scale, e[c + 1 :])
    e[c] = 0
    return a, rest


@compiled
def around_top(s, scale, e):
    """Equation 3: the top class, which alone can have p above 1/2, how far it is ahead of the others, r, Z, and e."""
    top = place_of_largest(s)
    a, rest = others(s, top, scale, e)
    gap = (np.float64(s[top]) - np.float64(a)) * scale
    r = np.exp(-gap) if rest > 0 or rest != rest else 0.0
    return top, gap, r, rest, 1 + r * rest


@compiled
def cross_entropy(s, m, mass, scale, g):
    """Equations 6 and 7."""
    real = s.dtype.type
    top, _, r, rest, z = around_top(s, scale, g)
    own, log_z = np.float64(m[top]), np.log1p(r * rest)
    m[top] = 0
    value, share = own * log_z, real(mass * r / z)
    for start in range(0, len(s), BLOCK):
        stop = start + BLOCK
        value += np.float64(entropies(s[start:stop], s[top], m[start:stop], scale, real(log_z), share, g[start:stop]))
    g[top] = real((total_of(m) - own * (r * rest)) / z * scale)
    return value


@summing
def entropies(s, most, m, scale, log_z, share, g):
    """The sum of m (log Z - x), and e <- scale (share e - m)."""
    zero, total = s.dtype.type(0), s.dtype.type(0)
    for i in range(len(s)):
        total += m[i] * ((most - s[i]) * scale + log_z) if m[i] != zero else zero
        g[i] = (share * g[i] - m[i]) * scale
    return total


@compiled
def at_masses(s, m, mass, scale, curves, parameters, owns, g, h):
    """Equations 3 to 5: every class on the curve; the top class by itself, in double precision."""
    real, n, sums, size = s.dtype.type, len(s), zeros(2), empty(5)
    top, gap, r, rest, z = around_top(s, scale, g)
    share, log_z = r / z, np.log1p(r * rest)
    size[SHARE], size[FACTOR], size[MOST], size[LOG_Z] = share, scale, s[top], log_z
    for start in range(0, n, BLOCK):
        count, size[SKIPPED] = min(BLOCK, n - start), top - start
        at = (address_of(s[start:]), address_of(g[start:]), address_of(m[start:]), mass, start, parameters, owns[0])
        call_softmax(curves[0], (count, *at, address_of(size), address_of(h[start:]), address_of(sums)))
    log_not = (np.log(rest) if rest > 0 or rest != rest else -np.inf) - gap - np.log(z)
    at_top = empty(6)
    at_top[0], at_top[1], at_top[2], at_top[3], at_top[4] = -log_z, log_not, 1 / z, r * rest / z, np.float64(m[top])
    value, own_slope = sums[0] + call_one(curves[1], at_top, mass, top, parameters, owns[1]), at_top[5]
    shared = real(sums[1] * share + (own_slope / rest if rest != 0 else 0.0))
    for i in range(n):
        g[i] = (h[i] - g[i] * shared) * scale
    g[top] = real((own_slope - sums[1] / z) * scale)
    return value


@compiled
def on_curve(log_odds, m, mass, c, curve, parameters, own):
    """The loss of a single class of these log-odds, and its slope."""
    x = empty(6)
    x[0], x[1], x[2], x[3] = probabilities_of(log_odds)
    x[4] = m
    if curve == 0:  # cross-entropy
        return -m * x[0], -m * x[3]
    return call_one(curve, x, mass, c, parameters, own), x[5]


@compiled
def call_one(curve, x, mass, c, parameters, own):
    """The loss of class c; x holds log p, log(1 - p), p, 1 - p and its mass, and gets its slope."""
    at = (address_of(x), address_of(x[1:]), address_of(x[2:]), address_of(x[3:]), address_of(x[4:]))
    return call_curve(curve, (1, *at, mass, c, parameters, own, address_of(x[5:])))
