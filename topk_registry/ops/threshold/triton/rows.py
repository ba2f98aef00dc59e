# type: ignore
"""Rows of sigmoids with a threshold in Triton, see README.md for the numbers of equations.

The scores are read again for each pass, from the cache. A step takes two: distances to the nearest scores, and sums.
"""

import triton
import triton.language as tl

from topk_registry.ops.gpu.arithmetic import exp, log, reciprocal, small_log1p
from topk_registry.ops.gpu.tiles import aligned, others, store
from topk_registry.ops.rows.triton.targets import clear, masses, targets

ENOUGH = tl.constexpr(1.7e-4)  # half the root of single precision's rounding: the error after a step is its square
ROUNDING = tl.constexpr(5e-7)  # of a gap's two sides
MOST_STEPS = tl.constexpr(200)  # 3 to 6 in practice, 40 where hundreds of scores lie far apart
PATIENCE = tl.constexpr(6)  # steps after which every third one leaps
FAR = tl.constexpr(3e38)


@triton.jit
def threshold_rows(
    s_ptr, target_ptr, share_ptr, uniform_ptr, weight_ptr, value_ptr, gradient_ptr,
    B, share, even, ignore_index, k, tau,
    M: tl.constexpr, MIXED: tl.constexpr, EVEN: tl.constexpr, WEIGHTED: tl.constexpr, GRADIENT: tl.constexpr,
    n: tl.constexpr, S: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
    TILES: tl.constexpr, HELD: tl.constexpr, VECTOR: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """The losses of R rows and their gradient."""
    row, live, counted, labels, shares = targets(
        target_ptr, share_ptr, uniform_ptr, B, share, even, ignore_index, M, MIXED, EVEN, n, R
    )
    start, shift = aligned(row, S, VECTOR)
    q_ptr = target_ptr + start if M == 0 else target_ptr
    if R > 1 or tl.sum(counted.to(tl.int32), 0) > 0:
        scale = 1.0 / tau
        scores_ptr = s_ptr + start
        reference, rest, spoilt = solved(scores_ptr, counted, labels[0], shift, k, tau, scale, n, R, N, TILES, SHIFTED)
        nearest = tl.zeros((R, N), tl.float32) + FAR
        slope = tl.zeros((R, N), tl.float32)
        costs = slope
        for tile in tl.range(TILES, loop_unroll_factor=2):
            u = distances(scores_ptr, counted, labels[0], shift, tile, reference, rest, scale, n, R, N, SHIFTED)
            nearest = tl.minimum(nearest, tl.abs(u))
            m = masses(
                q_ptr, weight_ptr, labels, shares, share, counted, shift, tile,
                M == 0, M, WEIGHTED, n, R, N, SHIFTED, EVEN,
            )  # fmt: skip
            e = exp(-tl.abs(u))
            costs += tl.where(m != 0.0, m * (small_log1p(e) - tl.minimum(u, 0.0)), 0.0)
            slope += m * not_chosen(u, e)
        tl.store(value_ptr + row, tl.where(counted, tl.sum(costs, 1) + spoilt, 0.0), mask=live)
        if GRADIENT:
            near = tl.min(nearest, 1)[:, None]
            total = tl.zeros((R, N), tl.float32)
            for tile in tl.range(TILES, loop_unroll_factor=2):
                u = distances(scores_ptr, counted, labels[0], shift, tile, reference, rest, scale, n, R, N, SHIFTED)
                total += slope_of(u, near)
            back = tl.where(counted, tl.sum(slope, 1) / tl.sum(total, 1) * scale, 0.0)[:, None] + spoilt[:, None]
            for tile in tl.range(TILES, loop_unroll_factor=2):
                u = distances(scores_ptr, counted, labels[0], shift, tile, reference, rest, scale, n, R, N, SHIFTED)
                m = masses(
                    q_ptr, weight_ptr, labels, shares, share, counted, shift, tile,
                    M == 0, M, WEIGHTED, n, R, N, SHIFTED, EVEN,
                )  # fmt: skip
                g = slope_of(u, near) * back - m * not_chosen(u, exp(-tl.abs(u))) * scale
                g = tl.where(counted[:, None], g, 0.0)
                store(gradient_ptr + start, g, live, shift, tile, n, R, N, SHIFTED)
    else:
        clear(value_ptr, gradient_ptr + start, row, shift, live, GRADIENT, n, R, N, TILES, SHIFTED)


@triton.jit
def distances(
    s_ptr, live, y, shift, tile, reference, rest, scale,
    n: tl.constexpr, R: tl.constexpr, N: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """x - b of a tile's scores, of those that are not there far below."""
    s = others(s_ptr, live, y, shift, tile, n, R, N, SHIFTED)
    return (s - reference[:, None]) * scale - rest[:, None]


@triton.jit
def not_chosen(u, e):
    """1 - p, e being exp(-|u|)."""
    r = reciprocal(1.0 + e)
    return tl.where(u > 0.0, e * r, r)


@triton.jit
def slope_of(u, near):
    """v relative to that of the nearest score."""
    r = reciprocal(1.0 + exp(-tl.abs(u)))
    return exp(near - tl.abs(u)) * r * r


@triton.jit
def solved(
    s_ptr, counted, y, shift, k, tau, scale,
    n: tl.constexpr, R: tl.constexpr, N: tl.constexpr, TILES: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """b of the rows, as a score and what it is above that one; NaN beside it for rows without one."""
    best = tl.full((R, N), float("-inf"), tl.float32)
    possible = tl.zeros((R, N), tl.float32)
    spoilt = possible
    for tile in tl.range(TILES, loop_unroll_factor=2):
        s = others(s_ptr, counted, y, shift, tile, n, R, N, SHIFTED)
        best = tl.maximum(best, s)
        possible += tl.where(s > float("-inf"), 1.0, 0.0)
        spoilt += tl.where((s != s) | (s == float("inf")), float("nan"), 0.0)
    broken = counted & ((tl.sum(spoilt, 1) != 0.0) | (tl.sum(possible, 1) <= k))
    a = tl.where(counted & (broken == 0), tl.max(best, 1), 0.0)
    total = tl.zeros((R, N), tl.float32)
    for tile in tl.range(TILES, loop_unroll_factor=2):
        total += exp((others(s_ptr, counted, y, shift, tile, n, R, N, SHIFTED) - a[:, None]) * scale)
    going = counted & (broken == 0)
    rest = tl.where(going, log(tl.sum(total, 1) / k), 0.0)  # b as a score and what it is above that, by equation 4
    reference = a
    low = tl.zeros((R,), tl.float32) - FAR
    high = tl.zeros((R,), tl.float32) + FAR
    stride = tl.zeros((R,), tl.float32) + 1.0
    turn = 0
    while (tl.max(going.to(tl.int32), 0) > 0) & (turn < MOST_STEPS):
        nearest = tl.where(going, reference + rest * tau, reference)
        moved = (nearest - reference) * scale
        # relative to a score that is far away the bracket would have no digits left
        reference, rest, low, high = nearest, rest - moved, low - moved, high - moved
        step, near = log_step(s_ptr, going, y, shift, reference, rest, scale, k, n, R, N, TILES, SHIFTED)
        rest += step
        going = going & (tl.abs(step) > near * ROUNDING + ENOUGH)
        low = tl.where(step > 0.0, rest - step, low)
        high = tl.where(step < 0.0, rest - step, high)
        middle = 0.5 * low + 0.5 * high
        leaps = (turn > PATIENCE) & (turn % 3 == 0)
        stride = tl.where(leaps, 2.0 * stride, stride)
        leap = rest + (stride - 1.0) * step
        leap = tl.where(step > 0.0, tl.minimum(leap, middle), tl.maximum(leap, middle))
        after = tl.where((rest < low) | (rest > high), middle, tl.where(leaps, leap, rest))
        rest = tl.where(going, after, rest)
        turn += 1
    return reference, rest, tl.where(broken | going, float("nan"), 0.0)


@triton.jit
def log_step(
    s_ptr, going, y, shift, reference, rest, scale, k,
    n: tl.constexpr, R: tl.constexpr, N: tl.constexpr, TILES: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """A step of Newton's method for equation 7, 0 for rows that are done; and where b is in a gap, its size."""
    low = tl.zeros((R, N), tl.float32) + FAR
    high = low
    for tile in tl.range(TILES, loop_unroll_factor=2):
        u = distances(s_ptr, going, y, shift, tile, reference, rest, scale, n, R, N, SHIFTED)
        low = tl.minimum(low, tl.where(u > 0.0, FAR, -u))
        high = tl.minimum(high, tl.where(u > 0.0, u, FAR))
    near_low = tl.min(low, 1)
    near_high = tl.min(high, 1)
    near_low = tl.where(near_low < FAR, near_low, 0.0)
    near_high = tl.where(near_high < FAR, near_high, 0.0)
    small_low = exp(-near_low)
    small_high = exp(-near_high)
    count = tl.zeros((R, N), tl.float32)
    below, above, below_slope, above_slope = count, count, count, count
    for tile in tl.range(TILES, loop_unroll_factor=2):
        u = distances(s_ptr, going, y, shift, tile, reference, rest, scale, n, R, N, SHIFTED)
        is_above = u > 0.0
        e = exp(tl.where(is_above, near_high[:, None], near_low[:, None]) - tl.abs(u))
        r = reciprocal(1.0 + e * tl.where(is_above, small_high[:, None], small_low[:, None]))
        p = e * r
        v = p * r
        above += tl.where(is_above, p, 0.0)
        below += tl.where(is_above, 0.0, p)
        above_slope += tl.where(is_above, v, 0.0)
        below_slope += tl.where(is_above, 0.0, v)
        count += tl.where(is_above, 1.0, 0.0)
    more = tl.sum(count, 1) - k
    low_log, low_slope = side(tl.sum(below, 1), tl.sum(below_slope, 1), near_low, small_low, more)
    high_log, high_slope = side(tl.sum(above, 1), tl.sum(above_slope, 1), near_high, small_high, -more)
    step = tl.where(going, (low_log - high_log) / (low_slope + high_slope), 0.0)
    return step, tl.where(more == 0.0, tl.maximum(near_low, near_high), 0.0)


@triton.jit
def side(total, slope, near, small, more):
    """log of e^-near total, and of ``more`` beside it where that is positive; and its derivative."""
    alone = more <= 0.0
    whole = tl.where(alone, total, more + small * total)
    return log(whole) - tl.where(alone, near, 0.0), tl.where(alone, slope, small * slope) / whole
