# type: ignore
"""Selection of the largest scores of a row.

They are found one after the other, in the order of scores and, among equal ones, of classes: a pass for each over a row
in registers, or over one that is read again from the cache.
"""

import triton
import triton.language as tl

from topk_registry.ops.gpu.tiles import classes, others


@triton.jit
def select(
    held, s_ptr, counted, y, shift, COUNT: tl.constexpr,
    n: tl.constexpr, R: tl.constexpr, N: tl.constexpr, TILES: tl.constexpr, HELD: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """The last of the ``COUNT`` largest scores and its class, those before it, the sum of all before the last, and
    whether a score is no number. Where there are fewer, scores are -inf and classes n."""
    v = tl.full((R,), float("inf"), tl.float32)
    i = tl.full((R,), -1, tl.int32)
    v_before, i_before, total = v, i, tl.zeros((R,), tl.float32)
    v, i, bad = next_largest(held, s_ptr, counted, y, shift, v, i, True, n, R, N, TILES, HELD, SHIFTED)
    for _ in range(1, COUNT):
        total += v
        v_before = v
        i_before = i
        v, i, _bad = next_largest(held, s_ptr, counted, y, shift, v, i, False, n, R, N, TILES, HELD, SHIFTED)
    return v, i, v_before, i_before, total, bad


@triton.jit
def next_largest(
    held, s_ptr, counted, y, shift, v, i, FIRST: tl.constexpr,
    n: tl.constexpr, R: tl.constexpr, N: tl.constexpr, TILES: tl.constexpr, HELD: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """The largest score after v at i, and whether a score is no number, which is looked for with ``FIRST``."""
    best = tl.full((R, N), float("-inf"), tl.float32)
    at = tl.full((R, N), n, tl.int32)
    bad = tl.zeros((R, N), tl.int32)
    if HELD:
        for tile in tl.static_range(TILES):
            best, at, bad = larger(held[tile], best, at, bad, shift, tile, v, i, FIRST, n, N, SHIFTED)
    else:
        for tile in tl.range(TILES):
            s = others(s_ptr, counted, y, shift, tile, n, R, N, SHIFTED)
            best, at, bad = larger(s, best, at, bad, shift, tile, v, i, FIRST, n, N, SHIFTED)
    largest_left = tl.max(best, 1)
    place = tl.min(tl.where(best == largest_left[:, None], at, n), 1)
    return largest_left, place, tl.max(bad, 1) > 0


@triton.jit
def larger(
    s, best, at, bad, shift, tile, v, i, FIRST: tl.constexpr, n: tl.constexpr, N: tl.constexpr, SHIFTED: tl.constexpr
):
    """The largest so far, its place, and what is no number, with those of a tile."""
    col, _there = classes(shift, tile, n, N, SHIFTED)
    better = s > best
    if FIRST:
        bad = bad | (s != s).to(tl.int32)
    else:
        better = better & ((s < v[:, None]) | ((s == v[:, None]) & (col > i[:, None])))
    return tl.where(better, s, best), tl.where(better, col, at), bad


@triton.jit
def comes_before(s, col, v, i):
    """Mark the scores that come before v at i."""
    return (s > v[:, None]) | ((s == v[:, None]) & (col < i[:, None]))
