# type: ignore
"""Rows of the top-k hinges in Triton, see README.md for the numbers of equations.

The last of the largest scores and its place say which classes come before it, see gpu/select.py.
"""

import triton
import triton.language as tl

from topk_registry.ops.gpu.select import comes_before, select
from topk_registry.ops.gpu.tiles import aligned, classes, others, store, tiles_of
from topk_registry.ops.rows.triton.targets import clear, masses, targets

RIVAL, RANK, CONVEX = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # what a label's score is held against


@triton.jit
def selection_rows(
    s_ptr, target_ptr, share_ptr, uniform_ptr, weight_ptr, value_ptr, gradient_ptr, own_ptr,
    B, share, even, ignore_index, alpha, factor,
    KIND: tl.constexpr, k: tl.constexpr, EACH: tl.constexpr,
    M: tl.constexpr, MIXED: tl.constexpr, EVEN: tl.constexpr, WEIGHTED: tl.constexpr, GRADIENT: tl.constexpr,
    n: tl.constexpr, S: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
    TILES: tl.constexpr, HELD: tl.constexpr, VECTOR: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """The losses of R rows and their gradient."""
    row, live, counted, labels, shares = targets(
        target_ptr, share_ptr, uniform_ptr, B, share, even, ignore_index, M, MIXED, EVEN, n, R
    )
    start, shift = aligned(row, S, VECTOR)
    if R > 1 or tl.sum(counted.to(tl.int32), 0) > 0:
        if M != 1 or EVEN:
            at_masses(
                s_ptr + start, target_ptr + start if M == 0 else target_ptr, weight_ptr, value_ptr + row,
                gradient_ptr + start, own_ptr, live, counted, shift, labels, shares, share, alpha, factor,
                KIND, k, EACH, M, EVEN, WEIGHTED, GRADIENT, n, R, N, TILES, HELD, SHIFTED,
            )  # fmt: skip
        else:
            at_labels(
                s_ptr + start, weight_ptr, value_ptr + row, gradient_ptr + start, own_ptr,
                live, counted, shift, labels[1], shares[0], alpha, factor,
                KIND, k, EACH, WEIGHTED, GRADIENT, n, R, N, TILES, HELD, SHIFTED,
            )  # fmt: skip
    else:
        clear(value_ptr, gradient_ptr + start, row, shift, live, GRADIENT, n, R, N, TILES, SHIFTED)


@triton.jit
def at_labels(
    s_ptr, weight_ptr, value_ptr, gradient_ptr, own_ptr, live, counted, shift, y, mass, alpha, factor,
    KIND: tl.constexpr, k: tl.constexpr, EACH: tl.constexpr, WEIGHTED: tl.constexpr, GRADIENT: tl.constexpr,
    n: tl.constexpr, R: tl.constexpr, N: tl.constexpr, TILES: tl.constexpr, HELD: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    known = y >= 0
    s_y = tl.load(s_ptr + shift + y, mask=known, other=float("nan")).to(tl.float32)
    if WEIGHTED:
        mass = mass * tl.load(weight_ptr + y, mask=known, other=1.0).to(tl.float32)
    left_out = y
    if KIND == RANK:
        left_out = tl.zeros_like(y) - 1
    held = tiles_of(s_ptr, counted, left_out, shift, n, R, N, TILES, HELD, SHIFTED)
    v, i, _v, _i, total, bad = select(
        held, s_ptr, counted, left_out, shift, k + 1 if KIND == RANK else k, n, R, N, TILES, HELD, SHIFTED
    )
    if KIND == CONVEX:
        last = v + 1.0
        violation = (total + (k - 1) + tl.maximum(last, s_y)) / k - s_y
        shared = tl.where(s_y > last, 1.0, tl.where(s_y == last, 0.5, 0.0))
        of_last = (1.0 - shared) / k
        of_label = shared / k - 1.0
    else:
        gap = gap_of(own_ptr, y, known, alpha, EACH)
        violation = gap + factor * (v - s_y)
        of_last = tl.zeros_like(v) + factor
        of_label = -of_last
    spoilt = tl.where(counted & (bad | (s_y != s_y)), float("nan"), 0.0)
    mass = tl.where(violation >= 0, mass, 0.0)
    value = tl.where(mass != 0.0, mass * violation, 0.0) + spoilt
    tl.store(value_ptr, tl.where(counted, value, 0.0), mask=live)
    if GRADIENT:
        mass = tl.where(counted, mass, 0.0)
        at_last = (mass * of_last + spoilt)[:, None]
        at_label = (mass * of_label)[:, None]
        before = (mass / k)[:, None]
        if HELD:
            for tile in tl.static_range(TILES):
                col, _there = classes(shift, tile, n, N, SHIFTED)
                g = tl.where(col == i[:, None], at_last, spoilt[:, None])
                g += tl.where(col == y[:, None], at_label, 0.0)
                if KIND == CONVEX:
                    g += tl.where(comes_before(held[tile], col, v, i), before, 0.0)
                store(gradient_ptr, g, live, shift, tile, n, R, N, SHIFTED)
        else:
            for tile in tl.range(TILES):
                col, _there = classes(shift, tile, n, N, SHIFTED)
                g = tl.where(col == i[:, None], at_last, spoilt[:, None])
                g += tl.where(col == y[:, None], at_label, 0.0)
                if KIND == CONVEX:
                    s = others(s_ptr, counted, left_out, shift, tile, n, R, N, SHIFTED)
                    g += tl.where(comes_before(s, col, v, i), before, 0.0)
                store(gradient_ptr, g, live, shift, tile, n, R, N, SHIFTED)


@triton.jit
def at_masses(
    s_ptr, q_ptr, weight_ptr, value_ptr, gradient_ptr, own_ptr,
    live, counted, shift, labels, shares, share, alpha, factor,
    KIND: tl.constexpr, k: tl.constexpr, EACH: tl.constexpr,
    M: tl.constexpr, EVEN: tl.constexpr, WEIGHTED: tl.constexpr, GRADIENT: tl.constexpr,
    n: tl.constexpr, R: tl.constexpr, N: tl.constexpr, TILES: tl.constexpr, HELD: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """Classes outside the k largest share one threshold, those inside have another."""
    none = labels[0]  # no class is left out
    held = tiles_of(s_ptr, counted, none, shift, n, R, N, TILES, HELD, SHIFTED)
    after, i_after, kth, i_kth, total, bad = select(
        held, s_ptr, counted, none, shift, k + 1, n, R, N, TILES, HELD, SHIFTED
    )
    of_row = kth, i_kth, after, total
    target = q_ptr, weight_ptr, labels, shares, share
    costs = tl.zeros((R, N), tl.float32)
    outside = tl.zeros((R, N), tl.float32)
    inside = tl.zeros((R, N), tl.float32)
    at_last = tl.zeros((R, N), tl.float32)
    if HELD:
        for tile in tl.static_range(TILES):
            cost, out, within, further, _own = hinges(
                held[tile], of_row, target, own_ptr, counted, shift, tile, alpha, factor,
                KIND, k, EACH, M, EVEN, WEIGHTED, n, R, N, SHIFTED,
            )  # fmt: skip
            costs += cost
            outside += out
            inside += within
            at_last += further
    else:
        for tile in tl.range(TILES):
            s = others(s_ptr, counted, none, shift, tile, n, R, N, SHIFTED)
            cost, out, within, further, _own = hinges(
                s, of_row, target, own_ptr, counted, shift, tile, alpha, factor,
                KIND, k, EACH, M, EVEN, WEIGHTED, n, R, N, SHIFTED,
            )  # fmt: skip
            costs += cost
            outside += out
            inside += within
            at_last += further
    unknown = shares[M] != shares[M]  # a label is no class
    spoilt = tl.where(counted & (bad | unknown), float("nan"), 0.0)
    tl.store(value_ptr, tl.where(counted, tl.sum(costs, 1) + spoilt, 0.0), mask=live)
    if GRADIENT:
        out = tl.sum(outside, 1)
        within = tl.sum(inside, 1)
        if KIND == CONVEX:
            to_top = tl.where(counted, (out + within) / k, 0.0)[:, None]
            to_kth = spoilt[:, None]
            to_after = tl.where(counted, tl.sum(at_last, 1) / k, 0.0)[:, None]
        else:
            to_top = tl.zeros_like(out)[:, None]
            to_kth = (tl.where(counted, factor * out, 0.0) + spoilt)[:, None]
            to_after = tl.where(counted, factor * within, 0.0)[:, None]
        if HELD:
            for tile in tl.static_range(TILES):
                _cost, _out, _within, _further, g = hinges(
                    held[tile], of_row, target, own_ptr, counted, shift, tile, alpha, factor,
                    KIND, k, EACH, M, EVEN, WEIGHTED, n, R, N, SHIFTED,
                )  # fmt: skip
                col, _there = classes(shift, tile, n, N, SHIFTED)
                g += tl.where(col == i_kth[:, None], to_kth, spoilt[:, None])
                g += tl.where(col == i_after[:, None], to_after, 0.0)
                if KIND == CONVEX:
                    g += tl.where(comes_before(held[tile], col, kth, i_kth + 1), to_top, 0.0)
                store(gradient_ptr, g, live, shift, tile, n, R, N, SHIFTED)
        else:
            for tile in tl.range(TILES):
                s = others(s_ptr, counted, none, shift, tile, n, R, N, SHIFTED)
                _cost, _out, _within, _further, g = hinges(
                    s, of_row, target, own_ptr, counted, shift, tile, alpha, factor,
                    KIND, k, EACH, M, EVEN, WEIGHTED, n, R, N, SHIFTED,
                )  # fmt: skip
                col, _there = classes(shift, tile, n, N, SHIFTED)
                g += tl.where(col == i_kth[:, None], to_kth, spoilt[:, None])
                g += tl.where(col == i_after[:, None], to_after, 0.0)
                if KIND == CONVEX:
                    g += tl.where(comes_before(s, col, kth, i_kth + 1), to_top, 0.0)
                store(gradient_ptr, g, live, shift, tile, n, R, N, SHIFTED)


@triton.jit
def hinges(
    s, of_row, target, own_ptr, counted, shift, tile, alpha, factor,
    KIND: tl.constexpr, k: tl.constexpr, EACH: tl.constexpr,
    M: tl.constexpr, EVEN: tl.constexpr, WEIGHTED: tl.constexpr,
    n: tl.constexpr, R: tl.constexpr, N: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """Of a tile: costs, masses of hinges that are not 0 outside and inside the k largest, what those inside put on the
    next score, and each hinge's slope in its own score."""
    kth, i_kth, after, total = of_row
    q_ptr, weight_ptr, labels, shares, share = target
    m = masses(
        q_ptr, weight_ptr, labels, shares, share, counted, shift, tile, M == 0, M, WEIGHTED, n, R, N, SHIFTED, EVEN
    )
    col, there = classes(shift, tile, n, N, SHIFTED)
    is_top = comes_before(s, col, kth, i_kth + 1)
    if KIND == CONVEX:
        last = after[:, None] + 1.0
        shared = tl.where(is_top & (s > last), 1.0, tl.where(is_top & (s == last), 0.5, 0.0))
        with_it = (total[:, None] - s + (k - 1) + tl.maximum(last, s)) / k - s
        violation = tl.where(is_top, with_it, total[:, None] / k + 1.0 - s)
        own = tl.where(is_top, (shared - 1.0) / k - 1.0, -1.0)  # it is one of the k, and gets nothing from itself
    else:
        threshold = after[:, None] + tl.zeros_like(s)
        if KIND == RIVAL:
            threshold = tl.where(is_top, after[:, None], kth[:, None])
        else:
            is_top = there | is_top  # all are held against the same
        shared = tl.zeros_like(s)
        violation = gap_of(own_ptr, col, there, alpha, EACH) + factor * (threshold - s)
        own = tl.zeros_like(s) - factor
    active = (m != 0.0) & (violation >= 0)
    m = tl.where(active, m, 0.0)
    cost = tl.where(active, m * violation, 0.0)
    within = tl.where(is_top, m, 0.0)
    return cost, m - within, within, within * (1.0 - shared), m * own


@triton.jit
def gap_of(own_ptr, where, there, alpha, EACH: tl.constexpr):
    """The gap that a class must have."""
    return tl.load(own_ptr + where, mask=there, other=0.0) if EACH else alpha
