# type: ignore
"""Rows of the sigmoid family in Triton, see README.md: one pass, every class on the curve."""

import triton
import triton.language as tl

from topk_registry.ops.gpu.arithmetic import probabilities
from topk_registry.ops.gpu.tiles import aligned, classes, others, store
from topk_registry.ops.rows.triton.targets import clear, masses, targets, whole_masses


@triton.jit
def sigmoid_rows(
    s_ptr, target_ptr, share_ptr, uniform_ptr, weight_ptr, value_ptr, gradient_ptr, own_ptr,
    B, share, even, ignore_index, x0, x1, x2, x3, x4, x5,
    CURVE: tl.constexpr, OTHERS: tl.constexpr, EACH: tl.constexpr,
    M: tl.constexpr, MIXED: tl.constexpr, EVEN: tl.constexpr, WEIGHTED: tl.constexpr, GRADIENT: tl.constexpr,
    n: tl.constexpr, S: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
    TILES: tl.constexpr, HELD: tl.constexpr, VECTOR: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """The losses of R rows and their gradient."""
    row, live, counted, labels, shares = targets(
        target_ptr, share_ptr, uniform_ptr, B, share, even, ignore_index, M, MIXED, EVEN, n, R
    )
    start, shift = aligned(row, S, VECTOR)
    numbers = (x0, x1, x2, x3, x4, x5)
    q_ptr = target_ptr + start if M == 0 else target_ptr
    if R > 1 or tl.sum(counted.to(tl.int32), 0) > 0:
        if OTHERS:
            whole = whole_masses(
                q_ptr, weight_ptr, labels, shares, share, counted, shift,
                M, EVEN, WEIGHTED, n, R, N, TILES, SHIFTED,
            )[:, None]  # fmt: skip
        costs = tl.zeros((R, N), tl.float32)
        for tile in tl.range(TILES, loop_unroll_factor=2):
            s = others(s_ptr + start, counted, labels[0], shift, tile, n, R, N, SHIFTED)
            m = masses(
                q_ptr, weight_ptr, labels, shares, share, counted, shift, tile,
                M == 0, M, WEIGHTED, n, R, N, SHIFTED, EVEN,
            )  # fmt: skip
            col, there = classes(shift, tile, n, N, SHIFTED)
            own = tl.zeros((R, N), tl.float32)
            if EACH:
                own += tl.load(own_ptr + col, mask=there, other=0.0)
            log_p, log_not, p, not_p = probabilities(s)
            if OTHERS:
                on, up, off, down = CURVE(log_p, log_not, p, not_p, own, numbers)
                inside = counted[:, None] & there
                costs += tl.where(m != 0.0, m * on, 0.0) + tl.where(inside, (whole - m) * off, 0.0)
                slope = tl.where(m != 0.0, m * up, 0.0) + tl.where(inside, (whole - m) * down, 0.0)
            else:
                on, up = CURVE(log_p, log_not, p, not_p, own, numbers)
                costs += tl.where(m != 0.0, m * on, 0.0)
                slope = tl.where(m != 0.0, m * up, 0.0)
            if GRADIENT:
                store(gradient_ptr + start, slope, live, shift, tile, n, R, N, SHIFTED)
        tl.store(value_ptr + row, tl.where(counted, tl.sum(costs, 1), 0.0), mask=live)
    else:
        clear(value_ptr, gradient_ptr + start, row, shift, live, GRADIENT, n, R, N, TILES, SHIFTED)
