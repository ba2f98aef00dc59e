# type: ignore
"""Rows of the softmax family in Triton, see README.md for the numbers of equations."""

import triton
import triton.language as tl

from topk_registry.ops.gpu.arithmetic import (
    LOG2E,
    exp,
    exp2,
    log,
    log1p,
    probabilities,
    reciprocal,
    small_log1p,
)
from topk_registry.ops.gpu.select import select
from topk_registry.ops.gpu.tiles import aligned, classes, others, store
from topk_registry.ops.rows.triton.targets import clear, masses, targets, whole_masses


@triton.jit
def softmax_rows(
    s_ptr, target_ptr, share_ptr, uniform_ptr, weight_ptr, value_ptr, gradient_ptr, added_ptr, own_ptr,
    B, share, even, ignore_index, scale, x0, x1, x2, x3, x4, x5,
    CURVE: tl.constexpr, OTHERS: tl.constexpr, ADDED: tl.constexpr, EACH: tl.constexpr, BEST: tl.constexpr,
    M: tl.constexpr, MIXED: tl.constexpr, EVEN: tl.constexpr, WEIGHTED: tl.constexpr, GRADIENT: tl.constexpr,
    n: tl.constexpr, S: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
    TILES: tl.constexpr, HELD: tl.constexpr, VECTOR: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """The losses of R rows and their gradient; without a curve cross-entropy."""
    row, live, counted, labels, shares = targets(
        target_ptr, share_ptr, uniform_ptr, B, share, even, ignore_index, M, MIXED, EVEN, n, R
    )
    start, shift = aligned(row, S, VECTOR)
    numbers = (x0, x1, x2, x3, x4, x5)
    if R > 1 or tl.sum(counted.to(tl.int32), 0) > 0:
        if M != 1 or EVEN or OTHERS:
            at_masses(
                s_ptr + start, target_ptr + start if M == 0 else target_ptr, weight_ptr, value_ptr + row,
                gradient_ptr + start, added_ptr, own_ptr, live, counted, shift, labels, shares, share, scale, numbers,
                CURVE, OTHERS, ADDED, EACH, BEST, M, EVEN, WEIGHTED, GRADIENT,
                n, R, N, TILES, HELD and not OTHERS, SHIFTED,
            )  # fmt: skip
        else:
            at_labels(
                s_ptr, weight_ptr, value_ptr, gradient_ptr, added_ptr, own_ptr,
                row, live, counted, start, shift, labels[1], shares[0], scale, numbers,
                CURVE, ADDED, EACH, BEST, WEIGHTED, GRADIENT, n, S, R, N, TILES, HELD, SHIFTED,
            )  # fmt: skip
    else:
        clear(value_ptr, gradient_ptr + start, row, shift, live, GRADIENT, n, R, N, TILES, SHIFTED)


@triton.jit
def scores(
    s_ptr, added_ptr, live, y, shift, tile,
    ADDED: tl.constexpr, n: tl.constexpr, R: tl.constexpr, N: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """A tile's scores, with what is added to each class's; -inf for class y."""
    s = others(s_ptr, live, y, shift, tile, n, R, N, SHIFTED)
    if ADDED:
        col, there = classes(shift, tile, n, N, SHIFTED)
        s += tl.load(added_ptr + col, mask=there, other=0.0)
    return s


@triton.jit
def at_labels(
    s_ptr, weight_ptr, value_ptr, gradient_ptr, added_ptr, own_ptr,
    row, live, counted, start, shift, y, mass, scale, numbers,
    CURVE: tl.constexpr, ADDED: tl.constexpr, EACH: tl.constexpr, BEST: tl.constexpr,
    WEIGHTED: tl.constexpr, GRADIENT: tl.constexpr,
    n: tl.constexpr, S: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
    TILES: tl.constexpr, HELD: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """Equations 1 and 2: with the label's log-odds, which are taken against the others alone."""
    steep = scale * LOG2E
    known = y >= 0
    s_y = tl.load(s_ptr + row * S + y, mask=known, other=float("nan")).to(tl.float32)
    if ADDED:
        s_y += tl.load(added_ptr + y, mask=known, other=0.0)
    if WEIGHTED:
        mass = mass * tl.load(weight_ptr + y, mask=known, other=1.0).to(tl.float32)
    own = tl.zeros_like(s_y)
    if EACH and not BEST:
        own = tl.load(own_ptr + y, mask=known, other=0.0)

    scores_ptr = s_ptr + start
    held = ()
    best = tl.full((R, N), float("-inf"), tl.float32)
    if HELD:
        for tile in tl.static_range(TILES):
            held = held + (scores(scores_ptr, added_ptr, counted, y, shift, tile, ADDED, n, R, N, SHIFTED),)
            best = tl.maximum(best, held[tile])
    else:
        for tile in tl.range(TILES, loop_unroll_factor=2):
            s = scores(scores_ptr, added_ptr, counted, y, shift, tile, ADDED, n, R, N, SHIFTED)
            best = tl.maximum(best, s)
    a = tl.max(best, 1)
    a = tl.where(a > float("-inf"), a, 0.0)
    reference = a[:, None]

    odds = ()
    total = tl.zeros((R, N), tl.float32)
    reached = tl.zeros((R, N), tl.float32)
    if HELD:
        for tile in tl.static_range(TILES):
            odds = odds + (exp2((held[tile] - reference) * steep),)
            total += odds[tile]
            if BEST:
                reached += tl.where(held[tile] >= s_y[:, None], 1.0, 0.0)
    else:
        for tile in tl.range(TILES, loop_unroll_factor=2):
            s = scores(scores_ptr, added_ptr, counted, y, shift, tile, ADDED, n, R, N, SHIFTED)
            total += exp2((s - reference) * steep)
            if BEST:
                reached += tl.where(s >= s_y[:, None], 1.0, 0.0)
    rest = tl.sum(total, 1)
    if BEST:
        own = tl.where(tl.sum(reached, 1) < BEST, 1.0, 0.0)

    log_p, log_not, p, not_p = probabilities((s_y - a) * scale - log(rest))
    if CURVE is None:
        value, slope = -log_p, -not_p
    else:
        value, slope = CURVE(log_p, log_not, p, not_p, own, numbers)
    spoilt = tl.where(rest == rest, 0.0, rest)
    value = tl.where(mass == 0.0, spoilt, mass * value + spoilt)
    slope = tl.where(mass == 0.0, 0.0, mass * slope) * scale + spoilt
    tl.store(value_ptr + row, tl.where(counted, value, 0.0), mask=live)

    if GRADIENT:
        back = tl.where(rest == 0.0, 0.0, -slope / rest)
        back = tl.where(counted, back, 0.0)[:, None]
        if HELD:
            for tile in tl.static_range(TILES):
                store(gradient_ptr + start, odds[tile] * back, live, shift, tile, n, R, N, SHIFTED)
        else:
            for tile in tl.range(TILES, loop_unroll_factor=2):
                s = scores(scores_ptr, added_ptr, counted, y, shift, tile, ADDED, n, R, N, SHIFTED)
                store(gradient_ptr + start, exp2((s - reference) * steep) * back, live, shift, tile, n, R, N, SHIFTED)
        tl.debug_barrier()  # the label's entries have been written with odds of zero, by other threads
        tl.store(gradient_ptr + row * S + y, slope, mask=known)


@triton.jit
def at_masses(
    s_ptr, q_ptr, weight_ptr, value_ptr, gradient_ptr, added_ptr, own_ptr,
    live, counted, shift, labels, shares, share, scale, numbers,
    CURVE: tl.constexpr, OTHERS: tl.constexpr, ADDED: tl.constexpr, EACH: tl.constexpr, BEST: tl.constexpr,
    M: tl.constexpr, EVEN: tl.constexpr, WEIGHTED: tl.constexpr, GRADIENT: tl.constexpr,
    n: tl.constexpr, R: tl.constexpr, N: tl.constexpr, TILES: tl.constexpr, HELD: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """Equations 3 to 7: the score of the top class is at least ``cut``; if several classes tie for it, none counts."""
    y = labels[0]  # no class is left out
    steep = scale * LOG2E
    held = ()
    first = tl.full((R, N), float("-inf"), tl.float32)
    second = first
    of_row = tl.zeros((R, N), tl.float32)
    if HELD:
        for tile in tl.static_range(TILES):
            held = held + (scores(s_ptr, added_ptr, counted, y, shift, tile, ADDED, n, R, N, SHIFTED),)
            second = tl.maximum(second, tl.minimum(first, held[tile]))
            first = tl.maximum(first, held[tile])
    else:
        for tile in tl.range(TILES, loop_unroll_factor=2):
            s = scores(s_ptr, added_ptr, counted, y, shift, tile, ADDED, n, R, N, SHIFTED)
            second = tl.maximum(second, tl.minimum(first, s))
            first = tl.maximum(first, s)
    most = tl.max(first, 1)
    at_most = first == most[:, None]
    a = tl.max(tl.where(at_most, second, first), 1)
    several = (tl.sum(at_most.to(tl.int32), 1) > 1) | (a == most)  # in several lanes, or in one of them
    a = tl.where(several, most, a)
    rival = a  # the largest score after the best
    if BEST > 1:
        rival, _i, _v, _j, _sum, _bad = select(held, s_ptr, counted, y, shift, BEST + 1, n, R, N, TILES, HELD, SHIFTED)
    a = tl.where(a > float("-inf"), a, most)  # a class that is alone
    cut = tl.where(several, float("inf"), most)[:, None]
    reference = a[:, None]

    odds = ()
    total = tl.zeros((R, N), tl.float32)
    costs = tl.zeros((R, N), tl.float32)  # of cross-entropy, as sums of masses times distances
    at_top = tl.zeros((R, N), tl.float32)
    if HELD:
        for tile in tl.static_range(TILES):
            odds = odds + (odds_of(held[tile], reference, cut, steep),)
            total += odds[tile]
            if CURVE is None:
                m = masses(
                    q_ptr, weight_ptr, labels, shares, share, counted, shift, tile,
                    M == 0, M, WEIGHTED, n, R, N, SHIFTED, EVEN,
                )  # fmt: skip
                costs += tl.where(m != 0.0, m * (most[:, None] - held[tile]), 0.0)
                of_row += tl.where(held[tile] >= cut, 0.0, m)
                at_top += tl.where(held[tile] >= cut, m, 0.0)
    else:
        for tile in tl.range(TILES, loop_unroll_factor=2):
            s = scores(s_ptr, added_ptr, counted, y, shift, tile, ADDED, n, R, N, SHIFTED)
            total += odds_of(s, reference, cut, steep)
            if CURVE is None:
                m = masses(
                    q_ptr, weight_ptr, labels, shares, share, counted, shift, tile,
                    M == 0, M, WEIGHTED, n, R, N, SHIFTED, EVEN,
                )  # fmt: skip
                costs += tl.where(m != 0.0, m * (most[:, None] - s), 0.0)
                of_row += tl.where(s >= cut, 0.0, m)
                at_top += tl.where(s >= cut, m, 0.0)
    rest = tl.sum(total, 1)
    rest = tl.where(several, rest - 1.0, rest)
    gap = (most - a) * scale
    r = exp(-gap)
    z = 1.0 + r * rest
    log_z = log1p(r * rest)
    back = reciprocal(z)

    if CURVE is None:
        own = tl.sum(at_top, 1)
        mass = tl.sum(of_row, 1)  # of the others
        value = tl.sum(costs, 1) * scale + (mass + own) * log_z
        tl.store(value_ptr, tl.where(counted, value, 0.0), mask=live)
        if GRADIENT:
            spoilt = tl.where(counted & (rest != rest), rest, 0.0)
            factor = ((mass + own) * r * back * scale + spoilt)[:, None]
            top = ((mass - own * (r * rest)) * back * scale)[:, None]
            if HELD:
                for tile in tl.static_range(TILES):
                    m = masses(
                        q_ptr, weight_ptr, labels, shares, share, counted, shift, tile,
                        M == 0, M, WEIGHTED, n, R, N, SHIFTED, EVEN,
                    )  # fmt: skip
                    g = tl.where(held[tile] >= cut, top, factor * odds[tile] - m * scale)
                    store(gradient_ptr, of_counted(g, counted, R), live, shift, tile, n, R, N, SHIFTED)
            else:
                for tile in tl.range(TILES, loop_unroll_factor=2):
                    s = scores(s_ptr, added_ptr, counted, y, shift, tile, ADDED, n, R, N, SHIFTED)
                    m = masses(
                        q_ptr, weight_ptr, labels, shares, share, counted, shift, tile,
                        M == 0, M, WEIGHTED, n, R, N, SHIFTED, EVEN,
                    )  # fmt: skip
                    g = tl.where(s >= cut, top, factor * odds_of(s, reference, cut, steep) - m * scale)
                    store(gradient_ptr, of_counted(g, counted, R), live, shift, tile, n, R, N, SHIFTED)
    else:
        mass = tl.zeros_like(r)
        if OTHERS:
            mass = whole_masses(
                q_ptr, weight_ptr, labels, shares, share, counted, shift, M, EVEN, WEIGHTED, n, R, N, TILES, SHIFTED
            )
        of_top = (
            cut, most[:, None], log_z[:, None], (r * back)[:, None], back[:, None], (r * rest * back)[:, None],
            (log(rest) - gap - log_z)[:, None], mass[:, None], rival[:, None],
        )  # fmt: skip
        costs = tl.zeros((R, N), tl.float32)
        slopes = tl.zeros((R, N), tl.float32)
        steps = ()
        if HELD:
            for tile in tl.static_range(TILES):
                cost, h, own = curve_of(
                    held[tile], odds[tile], of_top, q_ptr, weight_ptr, own_ptr, counted, shift, tile, labels, shares,
                    share, scale, numbers, CURVE, OTHERS, EACH, BEST, M, EVEN, WEIGHTED, n, R, N, SHIFTED,
                )  # fmt: skip
                steps = steps + (h,)
                costs += cost
                slopes += h
                at_top += own
        else:
            for tile in tl.range(TILES, loop_unroll_factor=2):
                s = scores(s_ptr, added_ptr, counted, y, shift, tile, ADDED, n, R, N, SHIFTED)
                cost, h, own = curve_of(
                    s, odds_of(s, reference, cut, steep), of_top, q_ptr, weight_ptr, own_ptr, counted, shift, tile,
                    labels, shares, share, scale, numbers, CURVE, OTHERS, EACH, BEST, M, EVEN, WEIGHTED,
                    n, R, N, SHIFTED,
                )  # fmt: skip
                costs += cost
                slopes += h
                at_top += own
        spoilt = tl.where(rest == rest, 0.0, rest)
        tl.store(value_ptr, tl.where(counted, tl.sum(costs, 1) + spoilt, 0.0), mask=live)
        if GRADIENT:
            slope = tl.sum(slopes, 1)
            own = tl.sum(at_top, 1)
            factor = slope * (r * back) + tl.where(rest == 0.0, 0.0, own / rest) + spoilt
            factor = tl.where(counted, factor, 0.0)[:, None]
            top = ((own - slope * back) * scale)[:, None]
            if HELD:
                for tile in tl.static_range(TILES):
                    g = tl.where(held[tile] >= cut, top, (steps[tile] - odds[tile] * factor) * scale)
                    store(gradient_ptr, of_counted(g, counted, R), live, shift, tile, n, R, N, SHIFTED)
            else:
                for tile in tl.range(TILES, loop_unroll_factor=2):
                    s = scores(s_ptr, added_ptr, counted, y, shift, tile, ADDED, n, R, N, SHIFTED)
                    w = odds_of(s, reference, cut, steep)
                    _, h, _ = curve_of(
                        s, w, of_top, q_ptr, weight_ptr, own_ptr, counted, shift, tile, labels, shares,
                        share, scale, numbers, CURVE, OTHERS, EACH, BEST, M, EVEN, WEIGHTED, n, R, N, SHIFTED,
                    )  # fmt: skip
                    g = tl.where(s >= cut, top, (h - w * factor) * scale)
                    store(gradient_ptr, of_counted(g, counted, R), live, shift, tile, n, R, N, SHIFTED)


@triton.jit
def of_counted(g, counted, R: tl.constexpr):
    """A gradient, and 0 for rows that are ignored; a row that is alone in its program is none."""
    if R > 1:
        g = tl.where(counted[:, None], g, 0.0)
    return g


@triton.jit
def odds_of(s, reference, cut, steep):
    """exp(scale (s - a)), and 0 for the top class."""
    return tl.where(s >= cut, 0.0, exp2((s - reference) * steep))


@triton.jit
def curve_of(
    s, w, of_top, q_ptr, weight_ptr, own_ptr, counted, shift, tile, labels, shares, share, scale, numbers,
    CURVE: tl.constexpr, OTHERS: tl.constexpr, EACH: tl.constexpr, BEST: tl.constexpr,
    M: tl.constexpr, EVEN: tl.constexpr, WEIGHTED: tl.constexpr,
    n: tl.constexpr, R: tl.constexpr, N: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """A tile's costs, and their slopes: of the top class, and of the others over 1 - p."""
    cut, most, log_z, to_p, p_top, not_top, log_not_top, mass, rival = of_top
    m = masses(
        q_ptr, weight_ptr, labels, shares, share, counted, shift, tile,
        M == 0, M, WEIGHTED, n, R, N, SHIFTED, EVEN,
    )  # fmt: skip
    col, there = classes(shift, tile, n, N, SHIFTED)
    own = tl.zeros((R, N), tl.float32)
    if BEST:
        own = tl.where(s > rival, 1.0, 0.0)
    elif EACH:
        own += tl.load(own_ptr + col, mask=there, other=0.0)
    is_top = s >= cut
    small = w * to_p
    p = tl.where(is_top, p_top, small)
    not_p = tl.where(is_top, not_top, 1.0 - small)
    log_not = tl.where(is_top, log_not_top, small_log1p(-small))
    log_p = (s - most) * scale - log_z
    if OTHERS:
        on, up, off, down = CURVE(log_p, log_not, p, not_p, own, numbers)
        inside = counted[:, None] & there
        cost = tl.where(m != 0.0, m * on, 0.0) + tl.where(inside, (mass - m) * off, 0.0)
        slope = tl.where(m != 0.0, m * up, 0.0) + tl.where(inside, (mass - m) * down, 0.0)
    else:
        on, up = CURVE(log_p, log_not, p, not_p, own, numbers)
        cost = tl.where(m != 0.0, m * on, 0.0)
        slope = tl.where(m != 0.0, m * up, 0.0)
    return cost, tl.where(is_top, 0.0, slope * reciprocal(not_p)), tl.where(is_top, slope, 0.0)
