# type: ignore
"""The margin of each row's label, its gradient and its hinge in one Triton kernel.

A flat row, with no softmax above 1 / (2k), is all tail: no class is searched for. After a pass for the largest score
its power sums and its gradient are a pass each. In any other row the top group is found one maximum at a time: first
the k largest classes, then those with odds above 1/2 where k - 1/2 classes are drawn.

A program works on R rows. A row of few tiles stays in registers; a longer one is read again from the cache for each
pass. Tiles begin at multiples of VECTOR numbers, so that all but the first and the last move whole vectors.
"""

import triton
import triton.language as tl

from topk_registry.ops.ksubset.triton.hinge import store_margin
from topk_registry.ops.ksubset.triton.polynomial import (
    CAP,
    chances,
    exp2,
    is_finite,
    lane_of,
    least_rest,
    tail_polynomial,
    times,
)

LOG2E = tl.constexpr(1.4426950408889634)
LIMIT = tl.constexpr(0.5)  # of the tail's odds
BALANCING = tl.constexpr(6)  # steps of Newton's method for the tilt, which needs no precision


@triton.jit
def label_rows(
    s_ptr, label_ptr, margin_ptr, gradient_ptr, B, depth, theta, theta_low, inverse,
    alpha_ptr, weight_ptr, value_ptr, slope_ptr, scale, scale_low, tau, inverse_tau, inverse_tau_low, factor,
    HINGE: tl.constexpr, PER_CLASS: tl.constexpr, WEIGHTED: tl.constexpr, FINAL: tl.constexpr,
    n: tl.constexpr, k: tl.constexpr, TP: tl.constexpr,
    R: tl.constexpr, N: tl.constexpr, TILES: tl.constexpr, HELD: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """With ``FINAL`` the gradient is that of the value: of the hinge, times ``factor`` and the label's weight."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    live = row < B
    y, s_y = label_and_score(s_ptr, label_ptr, row, live, n)
    start, shift = aligned(row, n, VECTOR)
    scores_ptr = s_ptr + start
    steep = inverse * LOG2E

    if HELD:
        held = ()
        for tile in tl.static_range(TILES):
            held = held + (others(scores_ptr, live, y, shift, tile, n, R, N, VECTOR),)
        best = held[0]
        for tile in tl.static_range(1, TILES):
            best = tl.maximum(best, held[tile])
    else:
        best = tl.full((R, N), float("-inf"), tl.float32)
        for tile in tl.range(TILES, loop_unroll_factor=2):
            best = tl.maximum(best, others(scores_ptr, live, y, shift, tile, n, R, N, VECTOR))
    a = tl.max(best, 1)

    if HELD:
        odds = ()
        for tile in tl.static_range(TILES):
            odds = odds + (exp2((held[tile] - a[:, None]) * steep),)
        sums = powers(odds[0], k)
        for tile in tl.static_range(1, TILES):
            sums = add(sums, powers(odds[tile], k), k)
    else:
        sums = powers(tl.zeros((R, N), tl.float32), k)
        for tile in tl.range(TILES, loop_unroll_factor=2):
            w = exp2((others(scores_ptr, live, y, shift, tile, n, R, N, VECTOR) - a[:, None]) * steep)
            sums = add(sums, powers(w, k), k)
    mass = tl.sum(sums[0], 1)  # NaN where a score is, or where all are -inf
    flat = live & (s_y == s_y) & (mass * LIMIT >= k)
    base = tl.where(flat, k / mass, 1.0)
    P = (mass * base,)
    power = base
    for j in tl.static_range(1, k):
        power = power * base
        P = P + (tl.sum(sums[j], 1) * power,)
    c = tail_polynomial(P, k)
    ratio = c[k - 1] / c[k]
    of_margin = store_margin(
        row, flat, y, s_y, a, ratio, base, theta, theta_low, flat == 0, margin_ptr,
        alpha_ptr, weight_ptr, value_ptr, slope_ptr, scale, scale_low, tau, inverse_tau, inverse_tau_low, factor,
        HINGE, PER_CLASS, WEIGHTED, FINAL,
    )  # fmt: skip

    if tl.max(flat.to(tl.int32), 0) > 0:
        balanced_c = columns(balanced(c, 1.0 / ratio, of_margin, k), k - 1)
        tilt = (base * ratio)[:, None]
        if HELD:
            for tile in tl.static_range(TILES):
                value = gradient(odds[tile] * tilt, balanced_c, of_margin[:, None], k)
                store(gradient_ptr + start, value, flat, shift, tile, n, R, N, VECTOR)
        else:
            for tile in tl.range(TILES, loop_unroll_factor=2):
                u = (others(scores_ptr, live, y, shift, tile, n, R, N, VECTOR) - a[:, None]) * steep
                value = gradient(exp2(u + tl.log2(tilt)), balanced_c, of_margin[:, None], k)
                store(gradient_ptr + start, value, flat, shift, tile, n, R, N, VECTOR)
        tl.debug_barrier()  # the label's entries have been written with odds of zero, by other threads
        tl.store(gradient_ptr + row * n + y, of_margin, mask=flat)

    for r in range(R):
        here = tl.program_id(0).to(tl.int64) * R + r
        if tl.sum(tl.where((row == here) & live & (flat == 0), 1, 0), 0) > 0:
            search_row(
                s_ptr, label_ptr, margin_ptr, gradient_ptr, here, depth, theta, theta_low, inverse,
                alpha_ptr, weight_ptr, value_ptr, slope_ptr,
                scale, scale_low, tau, inverse_tau, inverse_tau_low, factor,
                HINGE, PER_CLASS, WEIGHTED, FINAL, n, k, TP, N, TILES, VECTOR,
            )  # fmt: skip


@triton.jit
def search_row(
    s_ptr, label_ptr, margin_ptr, gradient_ptr, here, depth, theta, theta_low, inverse,
    alpha_ptr, weight_ptr, value_ptr, slope_ptr, scale, scale_low, tau, inverse_tau, inverse_tau_low, factor,
    HINGE: tl.constexpr, PER_CLASS: tl.constexpr, WEIGHTED: tl.constexpr, FINAL: tl.constexpr,
    n: tl.constexpr, k: tl.constexpr, TP: tl.constexpr,
    N: tl.constexpr, TILES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """The same for a row that is not flat, or that has a NaN, too few scores, or a label that is no class.

    ``depth`` is k, which the compiler is not to know: it would unroll loops and run out of registers.
    """
    label, s_y = label_and_score(s_ptr, label_ptr, here, here >= 0, n)
    row = here + tl.arange(0, 1)  # beside it only numbers: vectors of lanes take their layout from what they meet
    live = row >= 0
    y = label + tl.zeros((1,), tl.int32)
    start, shift = aligned(row, n, VECTOR)
    scores_ptr = s_ptr + start
    lane = tl.arange(0, TP)
    top = tl.full((TP,), float("-inf"), tl.float32)
    where = tl.full((TP,), n, tl.int32)

    v = depth * float("inf")
    i = depth - k - 1
    tiles = TILES + depth - k
    for f in range(depth):
        v, i = next_largest(scores_ptr, live, y, shift, v, i, n, N, tiles, VECTOR)
        top = tl.where(lane == f, v, top)
        where = tl.where(lane == f, i, where)
    a = v
    odds = tl.zeros((1, N), tl.float32)
    for tile in range(tiles):
        odds += tail_odds(scores_ptr, live, y, shift, tile, a, v, i, inverse, n, N, VECTOR)
    mass = number(odds)
    broken = (is_finite(a) == 0) | (s_y != s_y) | (mass != mass)

    size = depth
    u = balance((top - a) * inverse, mass, lane, depth, k)
    v, i = next_largest(scores_ptr, live, y, shift, v, i, n, N, tiles, VECTOR)
    w = tl.exp((v - a) * inverse)
    while (broken == 0) & (w * u > LIMIT) & (size < TP - 1):
        # a class that joins the group makes u grow, for the tail's odds counted for too much
        top = tl.where(lane == size, v, top)
        where = tl.where(lane == size, i, where)
        size += 1
        mass = tl.maximum(mass - w, 0.0)
        u = balance((top - a) * inverse, mass, lane, depth, k)
        v, i = next_largest(scores_ptr, live, y, shift, v, i, n, N, tiles, VECTOR)
        w = tl.exp((v - a) * inverse)
    x = (top - a) * inverse
    # the last of the k largest may need no products either
    size = tl.sum(((lane < size) & (tl.exp(tl.minimum(x, CAP)) * u > LIMIT)).to(tl.int32), 0)
    v = tl.where(size > 0, lane_of(top, lane, size - 1), float("inf"))
    i = tl.where(size > 0, tl.sum(tl.where(lane == size - 1, where, 0), 0), -1)

    sums = powers(tl.zeros((1, N), tl.float32), k)
    for tile in range(tiles):
        odds = tail_odds(scores_ptr, live, y, shift, tile, a, v, i, inverse, n, N, VECTOR)
        sums = add(sums, powers(odds * u, k), k)
    P = ()
    for j in tl.static_range(k):
        P = P + (number(sums[j]),)
    b = tail_polynomial(P, k)
    e = ()
    for j in tl.static_range(k + 1):
        e = e + (b[j] + tl.zeros((TP,), tl.float32),)
    for f in range(size):
        q, p = chances(lane_of(x, lane, f), 1.0 / u)
        e = times(e, tl.where(lane == f, 1.0, q), tl.where(lane == f, 0.0, p), k)
    c = ()
    for j in tl.static_range(k + 1):
        c = c + (lane_of(e[j], lane, TP - 1),)  # the last lane leaves out nothing
    ratio = c[k - 1] / c[k]
    of_margin = store_margin(
        here, here >= 0, label, s_y, a, ratio, u, theta, theta_low, broken, margin_ptr,
        alpha_ptr, weight_ptr, value_ptr, slope_ptr, scale, scale_low, tau, inverse_tau, inverse_tau_low, factor,
        HINGE, PER_CLASS, WEIGHTED, FINAL,
    )  # fmt: skip
    of_margin = tl.where(broken, float("nan"), of_margin)

    balanced_c = balanced(c, 1.0 / ratio, of_margin, k)
    tilt = u * ratio
    for tile in range(tiles):
        odds = tail_odds(scores_ptr, live, y, shift, tile, a, v, i, inverse, n, N, VECTOR)
        store(gradient_ptr + start, gradient(odds * tilt, balanced_c, of_margin, k), live, shift, tile, n, 1, N, VECTOR)
    _, p = chances(x, 1.0 / u)
    in_top = -e[k - 1] / c[k]
    if k > 1:
        in_top += e[k - 2] / c[k - 1]
    tl.debug_barrier()  # these entries have been written with odds of zero, by other threads
    tl.store(gradient_ptr + here * n + where, of_margin * (p * in_top), mask=(lane < size) & (where < n))
    tl.store(gradient_ptr + here * n + label, of_margin, mask=label >= 0)


@triton.jit
def label_and_score(s_ptr, label_ptr, row, live, n: tl.constexpr):
    """The label, -1 if it is no class, and its score."""
    y = tl.load(label_ptr + row, mask=live, other=-1)
    known = (y >= 0) & (y < n)
    s_y = tl.load(s_ptr + row * n + y, mask=known, other=float("nan")).to(tl.float32)
    return tl.where(known, y, -1).to(tl.int32), s_y


@triton.jit
def aligned(row, n: tl.constexpr, VECTOR: tl.constexpr):
    """Where the first tile of a row begins, and how many numbers before the row that is."""
    if n % VECTOR == 0:
        return row * n, (row * 0).to(tl.int32)
    else:
        start = row * n // VECTOR * VECTOR
        return start, (row * n - start).to(tl.int32)


@triton.jit
def others(s_ptr, live, y, shift, tile, n: tl.constexpr, R: tl.constexpr, N: tl.constexpr, VECTOR: tl.constexpr):
    """The scores of a tile [R, N], with -inf for the label and for what is not in the row."""
    place = tile * N + tl.arange(0, N)[None, :]
    pointers = s_ptr[:, None] + place
    if R > 1:
        s = masked(pointers, place, live, y, shift, n, VECTOR)
    else:  # most tiles are within the row and without the label: they need no comparisons
        first = tile * N - tl.sum(shift, 0)
        label = tl.sum(y, 0)
        if (first >= 0) & (first + N <= n) & ((label < first) | (label >= first + N)):
            s = tl.load(pointers).to(tl.float32)
        else:
            s = masked(pointers, place, live, y, shift, n, VECTOR)
    return s


@triton.jit
def masked(pointers, place, live, y, shift, n: tl.constexpr, VECTOR: tl.constexpr):
    col = place - shift[:, None]
    if n % VECTOR == 0:
        col = place
        s = tl.load(pointers, mask=live[:, None] & (col < n), other=float("-inf"))
    else:
        s = tl.load(pointers, mask=live[:, None] & (col >= 0) & (col < n), other=float("-inf"))
    return tl.where(col == y[:, None], float("-inf"), s.to(tl.float32))


@triton.jit
def store(
    out_ptr, values, wanted, shift, tile, n: tl.constexpr, R: tl.constexpr, N: tl.constexpr, VECTOR: tl.constexpr
):
    """Write a tile of the wanted rows; a row that is alone in its program is wanted."""
    place = tile * N + tl.arange(0, N)[None, :]
    pointers = out_ptr[:, None] + place
    values = values.to(out_ptr.dtype.element_ty)
    if R == 1 and n % VECTOR == 0:
        if (tile + 1) * N <= n:
            tl.store(pointers, values)
        else:
            tl.store(pointers, values, mask=place < n)
    elif R == 1:
        if (tile > 0) & ((tile + 1) * N <= n):
            tl.store(pointers, values)
        else:
            store_masked(pointers, values, place - shift[:, None], n)
    else:
        tl.store(pointers, values, mask=wanted[:, None] & (place < n))


@triton.jit
def store_masked(pointers, values, col, n: tl.constexpr):
    tl.store(pointers, values, mask=(col >= 0) & (col < n))


@triton.jit
def powers(w, k: tl.constexpr):
    """w, w^2, ..., w^k."""
    out = (w,)
    for j in tl.static_range(2, k + 1):
        out = out + (out[j // 2 - 1] * out[j // 2 - 1] if j % 2 == 0 else out[j - 2] * w,)
    return out


@triton.jit
def add(a, b, k: tl.constexpr):
    out = ()
    for j in tl.static_range(k):
        out = out + (a[j] + b[j],)
    return out


@triton.jit
def balanced(c, back, of_margin, k: tl.constexpr):
    """Coefficients 0..k-2, times of_margin, of c tilted so that the next two are 1; back = c_k / c_{k-1}."""
    out = ()
    rho = of_margin * (back * back / c[k])
    for j in tl.static_range(2, k + 1):
        out = (c[k - j] * rho,) + out
        rho = rho * back
    return out


@triton.jit
def gradient(v, c, of_margin, k: tl.constexpr):
    """of_margin v (d_{k-2} (1 + v) - 1), where d_{k-2} - d_{k-1} = d_{k-2} (1 + v) - 1; v the balanced odds."""
    out = -v * of_margin
    if k > 1:
        d = tl.zeros_like(v) + c[0]
        for j in tl.static_range(1, k - 1):
            d = c[j] - v * d
        out = v * ((d - of_margin) + d * v)
    return out


@triton.jit
def columns(numbers, count: tl.constexpr):
    """Numbers of rows [R] as [R, 1]."""
    out = ()
    for j in tl.static_range(count):
        out = out + (numbers[j][:, None],)
    return out


@triton.jit
def number(tile):
    """The sum of a tile of one row."""
    return tl.sum(tl.sum(tile, 1), 0)


@triton.jit
def next_largest(s_ptr, live, y, shift, v, i, n: tl.constexpr, N: tl.constexpr, tiles, VECTOR: tl.constexpr):
    """The largest score after v at i, ties in the order of classes, and its class; -inf and n where there is none."""
    best = tl.full((1, N), float("-inf"), tl.float32)
    at = tl.full((1, N), n, tl.int32)
    for tile in range(tiles):
        s = others(s_ptr, live, y, shift, tile, n, 1, N, VECTOR)
        col = tile * N + tl.arange(0, N)[None, :] - shift[:, None]
        better = ((s < v) | ((s == v) & (col > i))) & (s > best)
        best = tl.where(better, s, best)
        at = tl.where(better, col, at)
    v = tl.max(tl.max(best, 1), 0)
    return v, tl.min(tl.min(tl.where(best == v, at, n), 1), 0)


@triton.jit
def tail_odds(s_ptr, live, y, shift, tile, a, v, i, inverse, n: tl.constexpr, N: tl.constexpr, VECTOR: tl.constexpr):
    """exp((s - a) / theta) of the classes after score v at i, 0 for all others; NaN stays NaN."""
    s = others(s_ptr, live, y, shift, tile, n, 1, N, VECTOR)
    col = tile * N + tl.arange(0, N)[None, :] - shift[:, None]
    in_group = (s > v) | ((s == v) & (col <= i))
    return tl.where(in_group, 0.0, tl.exp((s - a) * inverse))


@triton.jit
def balance(x, mass, lane, depth, k: tl.constexpr):
    """The factor u of odds where k - 1/2 classes are drawn, about: from a top group as lanes and the tail's mass."""
    E = tl.exp(tl.minimum(x, CAP))
    # draws from k/2 to k classes: Newton's method goes on from there
    u = 1.0 / least_rest(x, mass, lane, k)
    for _ in range(depth - k + BALANCING):
        q = 1.0 / (1.0 + E * u)
        drawn = mass * u + tl.sum(E * u * q, 0)
        slope = mass + tl.sum(E * q * q, 0)
        u += (k - 0.5 - drawn) / slope
    return u
