# type: ignore
"""Rows of the losses of sums of squares in Triton, see README.md for the numbers of equations."""

import triton
import triton.language as tl

from topk_registry.ops.gpu.arithmetic import LN2, exp, log, log2, reciprocal, small_log1p
from topk_registry.ops.gpu.tiles import aligned, classes, others, store
from topk_registry.ops.rows.triton.targets import clear, masses, targets, whole_masses

TINY = tl.constexpr(1.1754943508222875e-38)
XI_MIN = tl.constexpr(1e-4)
NEWTON_STEPS = tl.constexpr(6)


@triton.jit
def squares_rows(
    s_ptr, target_ptr, share_ptr, uniform_ptr, weight_ptr, value_ptr, gradient_ptr,
    B, share, even, ignore_index, added, root,
    BOUND: tl.constexpr, M: tl.constexpr, MIXED: tl.constexpr, EVEN: tl.constexpr, WEIGHTED: tl.constexpr,
    GRADIENT: tl.constexpr,
    n: tl.constexpr, S: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
    TILES: tl.constexpr, HELD: tl.constexpr, VECTOR: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """The losses of R rows and their gradient; root is that of epsilon."""
    row, live, counted, labels, shares = targets(
        target_ptr, share_ptr, uniform_ptr, B, share, even, ignore_index, M, MIXED, EVEN, n, R
    )
    start, shift = aligned(row, S, VECTOR)
    q_ptr = target_ptr + start if M == 0 else target_ptr
    if R > 1 or tl.sum(counted.to(tl.int32), 0) > 0:
        of_squares(
            s_ptr + start, q_ptr, weight_ptr, value_ptr + row, gradient_ptr + start,
            live, counted, shift, labels, shares, share, added, root,
            BOUND, M, EVEN, WEIGHTED, GRADIENT, n, R, N, TILES, HELD, SHIFTED,
        )  # fmt: skip
    else:
        clear(value_ptr, gradient_ptr + start, row, shift, live, GRADIENT, n, R, N, TILES, SHIFTED)


@triton.jit
def numbers_of(
    s_ptr, counted, y, shift, tile, added, n: tl.constexpr, R: tl.constexpr, N: tl.constexpr, SHIFTED: tl.constexpr
):
    """A tile's scores + added, and 0 for what is not in the row."""
    s = others(s_ptr, counted, y, shift, tile, n, R, N, SHIFTED)
    _, there = classes(shift, tile, n, N, SHIFTED)
    return tl.where(counted[:, None] & there, s + added, 0.0)


@triton.jit
def of_squares(
    s_ptr, q_ptr, weight_ptr, value_ptr, gradient_ptr,
    live, counted, shift, labels, shares, share, added, root,
    BOUND: tl.constexpr, M: tl.constexpr, EVEN: tl.constexpr, WEIGHTED: tl.constexpr, GRADIENT: tl.constexpr,
    n: tl.constexpr, R: tl.constexpr, N: tl.constexpr, TILES: tl.constexpr, HELD: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """Squares are taken of numbers over the largest, and the largest is multiplied back where it cannot overflow."""
    y = labels[0]  # no class is left out
    held = ()
    peaks = tl.full((R, N), 0.0, tl.float32)
    total = tl.zeros((R, N), tl.float32)
    if HELD:
        for tile in tl.static_range(TILES):
            held = held + (numbers_of(s_ptr, counted, y, shift, tile, added, n, R, N, SHIFTED),)
            peaks = tl.maximum(peaks, tl.abs(held[tile]))
            total += held[tile]
    else:
        for tile in tl.range(TILES, loop_unroll_factor=2):
            s = numbers_of(s_ptr, counted, y, shift, tile, added, n, R, N, SHIFTED)
            peaks = tl.maximum(peaks, tl.abs(s))
            total += s
    peak = tl.maximum(tl.max(peaks, 1), root)
    centre = tl.zeros_like(peak)
    if BOUND:
        peak = tl.maximum(2.0 * peak, TINY)
        centre = tl.sum(total, 1) / n
    scale = (1.0 / peak)[:, None]
    middle = centre[:, None]

    squares = tl.zeros((R, N), tl.float32)
    costs = tl.zeros((R, N), tl.float32)
    if HELD:
        for tile in tl.static_range(TILES):
            x = centred(held[tile], middle, shift, tile, BOUND, n, N, SHIFTED)
            squares += (x * scale) * (x * scale)
            if M != 1 or EVEN:
                m = masses(
                    q_ptr, weight_ptr, labels, shares, share, counted, shift, tile,
                    M == 0, M, WEIGHTED, n, R, N, SHIFTED, EVEN,
                )  # fmt: skip
                costs += tl.where(m != 0.0, m * cost_of(x, root, BOUND), 0.0)
    else:
        for tile in tl.range(TILES, loop_unroll_factor=2):
            s = numbers_of(s_ptr, counted, y, shift, tile, added, n, R, N, SHIFTED)
            x = centred(s, middle, shift, tile, BOUND, n, N, SHIFTED)
            squares += (x * scale) * (x * scale)
            if M != 1 or EVEN:
                m = masses(
                    q_ptr, weight_ptr, labels, shares, share, counted, shift, tile,
                    M == 0, M, WEIGHTED, n, R, N, SHIFTED, EVEN,
                )  # fmt: skip
                costs += tl.where(m != 0.0, m * cost_of(x, root, BOUND), 0.0)
    mass = whole_masses(
        q_ptr, weight_ptr, labels, shares, share, counted, shift, M, EVEN, WEIGHTED, n, R, N, TILES, SHIFTED
    )
    sum_of_squares = tl.sum(squares, 1)
    if BOUND:
        xi, partition = bound(sum_of_squares, peak, n)
        factor = mass * ((1.0 - 2.0 / (exp(xi) + 1.0)) / (2.0 * xi)) * peak
        spread = mass / n + tl.where(sum_of_squares == sum_of_squares, 0.0, sum_of_squares)
    else:
        small = root / peak
        whole = sum_of_squares + n * (small * small)
        partition = log(whole) + 2.0 * log(peak)
        factor = 2.0 * mass / whole / peak
        spread = tl.zeros_like(mass)
    if M != 1 or EVEN:
        cost = tl.sum(costs, 1)
    else:  # the label alone has a mass
        known = labels[1] >= 0
        own = tl.load(s_ptr + shift + labels[1], mask=known, other=float("nan")).to(tl.float32) + added - centre
        cost = tl.where(mass != 0.0, mass * cost_of(own, root, BOUND), 0.0)
    tl.store(value_ptr, tl.where(counted, mass * partition - cost, 0.0), mask=live)

    if GRADIENT:
        of_all = tl.where(counted, factor, 0.0)[:, None]
        of_each = tl.where(counted, spread, 0.0)[:, None]
        if HELD:
            for tile in tl.static_range(TILES):
                x = centred(held[tile], middle, shift, tile, BOUND, n, N, SHIFTED)
                g = (x * scale) * of_all + of_each
                if M != 1 or EVEN:
                    m = masses(
                        q_ptr, weight_ptr, labels, shares, share, counted, shift, tile,
                        M == 0, M, WEIGHTED, n, R, N, SHIFTED, EVEN,
                    )  # fmt: skip
                    g -= m * slope_of(x, root, BOUND)
                store(gradient_ptr, g, live, shift, tile, n, R, N, SHIFTED)
        else:
            for tile in tl.range(TILES, loop_unroll_factor=2):
                s = numbers_of(s_ptr, counted, y, shift, tile, added, n, R, N, SHIFTED)
                x = centred(s, middle, shift, tile, BOUND, n, N, SHIFTED)
                g = (x * scale) * of_all + of_each
                if M != 1 or EVEN:
                    m = masses(
                        q_ptr, weight_ptr, labels, shares, share, counted, shift, tile,
                        M == 0, M, WEIGHTED, n, R, N, SHIFTED, EVEN,
                    )  # fmt: skip
                    g -= m * slope_of(x, root, BOUND)
                store(gradient_ptr, g, live, shift, tile, n, R, N, SHIFTED)
        if M == 1 and not EVEN:
            g = (own / peak) * factor + spread - mass * slope_of(own, root, BOUND)
            tl.debug_barrier()  # the label's entries have been written as all others, by other threads
            tl.store(gradient_ptr + shift + labels[1], g, mask=known)


@triton.jit
def centred(s, middle, shift, tile, BOUND: tl.constexpr, n: tl.constexpr, N: tl.constexpr, SHIFTED: tl.constexpr):
    x = s
    if BOUND:
        _, there = classes(shift, tile, n, N, SHIFTED)
        x = tl.where(there, s - middle, 0.0)
    return x


@triton.jit
def cost_of(x, root, BOUND: tl.constexpr):
    """Return a class's score, log(x^2 + root^2) with the larger out of the square, or x itself for the bound."""
    if BOUND:
        return x
    else:
        large, _, ratio = of_two(x, root)
        return LN2 * (2.0 * log2(large) + log2(1.0 + ratio * ratio))


@triton.jit
def slope_of(x, root, BOUND: tl.constexpr):
    """Return the slope of a class's score."""
    if BOUND:
        return tl.zeros_like(x) + 1.0
    else:
        _, back, ratio = of_two(x, root)
        return 2.0 * (x * back) * (back * reciprocal(1.0 + ratio * ratio))


@triton.jit
def of_two(x, root):
    """The larger of |x| and root, 1 over it, and the smaller one over it."""
    size = tl.abs(x)
    large = tl.maximum(size, root, propagate_nan=tl.PropagateNan.ALL)
    back = reciprocal(large)
    return large, back, tl.minimum(size, root) * back


@triton.jit
def bound(squares, peak, D: tl.constexpr):
    """Equations 3 and 5: xi by Newton's method in its bracket, see the definition, and the bound on log sum exp."""
    d: tl.constexpr = 2 / D
    c: tl.constexpr = (2 / D * (2 - 2 / D)) ** 0.5
    log_rest = log(tl.full((), D - 1, tl.float32))
    rms = tl.sqrt(squares / D) * peak
    low = tl.maximum(rms / c, tl.maximum(log_rest, XI_MIN))
    high = tl.maximum(1.5 * rms / c, log_rest + 1.0)
    xi = 0.5 * low + 0.5 * high
    for _ in tl.static_range(NEWTON_STEPS):
        u = 2.0 / (exp(xi) + 1.0)
        t = 1.0 - u
        W = tl.maximum((d - u) * (2.0 - d - u) / (t * t), 0.0)
        slope = 2.0 * (1.0 - d) * (1.0 - d) * u * (1.0 - 0.5 * u) / (t * t * t)
        xi -= (xi * W - rms * (rms / xi)) / (2.0 * W + xi * slope)
        xi = tl.minimum(tl.maximum(xi, low), high)
    u = 2.0 / (exp(xi) + 1.0)
    t = 1.0 - u
    partition = xi / t * ((D - 1) / D - 0.25 * D * u * u) + D * small_log1p(exp(-xi))
    return xi, partition + 0.25 * t * (rms / xi) * rms * D
