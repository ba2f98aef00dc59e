# type: ignore
"""Triton kernels for classes that come in chunks: the state of a row, and the gradient to a chunk of its scores.

A state is that of torch/state.py: the 2k + 1 largest scores with their classes, and the power sums of all other
classes' odds, in double precision, relative to the k-th largest score.
"""

import triton
import triton.language as tl

from topk_registry.ops.ksubset.triton.polynomial import lane_of
from topk_registry.ops.ksubset.triton.rows import add, powers

LEAST = tl.constexpr(-3.4028234663852886e38)  # the reference where there are fewer than k scores


@triton.jit
def extend_state(
    s_ptr, label_ptr, top_ptr, class_ptr, P_ptr, score_ptr, n, first, inverse,
    k: tl.constexpr, T: tl.constexpr, TP: tl.constexpr, N: tl.constexpr, WITHOUT_LABEL: tl.constexpr,
):  # fmt: skip
    """Merge the scores of classes first, first + 1, ..., but the label's, into the state of a row."""
    row = tl.program_id(0).to(tl.int64)
    s_ptr += row * n
    y = n
    if WITHOUT_LABEL:
        label = tl.load(label_ptr + row) - first
        mine = (label >= 0) & (label < n)
        y = tl.where(mine, label, n).to(tl.int32)
        tl.store(score_ptr + row, tl.load(s_ptr + label, mask=mine, other=0.0).to(tl.float32), mask=mine)
    lane = tl.arange(0, TP)
    held = lane < T
    before = tl.load(top_ptr + row * T + lane, mask=held, other=float("inf"))
    names = tl.load(class_ptr + row * T + lane, mask=held, other=0)
    top = before
    fallen = lane < 0
    last = tl.full((), float("inf"), tl.float32)  # the scores after this one, at this place, are not in the top group
    place = tl.full((), -1, tl.int32)
    least = tl.min(top, 0)
    v, i = largest_in_chunk(s_ptr, y, n, N), tl.full((), -1, tl.int32)
    if v > least:  # of most chunks nothing joins the top group: no place was looked for
        v, i = next_in_chunk(s_ptr, y, last, place, n, N)
    while v > least:
        last = v
        place = i
        top, names, fallen, v, i = take_place(s_ptr, y, top, names, fallen, least, v, i, n, first, TP, N)
        least = tl.min(top, 0)

    above = (top[None, :] > top[:, None]) | ((top[None, :] == top[:, None]) & (lane[None, :] < lane[:, None]))
    rank = tl.sum((above & (lane[None, :] < T)).to(tl.int32), 1)
    a_before = tl.maximum(lane_of(before, lane, k - 1), LEAST)
    a = tl.maximum(tl.sum(tl.where((rank == k - 1) & held, top, 0.0), 0), LEAST)
    sums = powers(tl.zeros((N,), tl.float32), k)
    for start in range(0, n, N):
        col = start + tl.arange(0, N)
        s = load_scores(s_ptr, y, col, n)
        in_group = (s > last) | ((s == last) & (col <= place))
        sums = add(sums, powers(tl.where(in_group, 0.0, tl.exp((s - a) * inverse)), k), k)
    out = powers(tl.where(fallen, tl.exp((before - a) * inverse), 0.0), k)
    shrunk = tl.exp((a_before - a) * inverse).to(tl.float64)
    factor = shrunk
    for j in tl.static_range(k):
        P = tl.load(P_ptr + row * k + j) * factor
        P += tl.sum(sums[j], 0).to(tl.float64) + tl.sum(out[j], 0).to(tl.float64)
        tl.store(P_ptr + row * k + j, P)
        factor = factor * shrunk
    tl.debug_barrier()  # all threads have read the state
    tl.store(top_ptr + row * T + rank, top, mask=held)
    tl.store(class_ptr + row * T + rank, names, mask=held)


@triton.jit
def take_place(s_ptr, y, top, names, fallen, least, v, i, n, first, TP: tl.constexpr, N: tl.constexpr):
    """Put a score in the place of the least, where it stays as those after it are smaller; and find the next one."""
    lane = tl.arange(0, TP)
    slot = tl.min(tl.where(top == least, lane, TP), 0)
    top = tl.where(lane == slot, v, top)
    names = tl.where(lane == slot, (first + i).to(tl.int64), names)
    fallen = fallen | (lane == slot)
    v, i = next_in_chunk(s_ptr, y, v, i, n, N)
    return top, names, fallen, v, i


@triton.jit
def chunk_gradient(
    s_ptr, label_ptr, g_ptr, a_ptr, scale_ptr, c_ptr, class_ptr, in_top_ptr, out_ptr, B, n, first, inverse,
    k: tl.constexpr, T: tl.constexpr, TP: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """g v (d_{k-2} (1 + v) - 1) for the tail, v the balanced odds, d = c / (1 + v X); g in_top for the top group; g for
    the label."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * N
    col = start + tl.arange(0, N)
    s = tl.load(s_ptr + row * n + col, mask=col < n, other=float("-inf")).to(tl.float32)
    g = tl.load(g_ptr + row)
    v = tl.exp((s - tl.load(a_ptr + row)) * inverse) * tl.load(scale_ptr + row)
    gradient = -v
    if k > 1:
        d = tl.zeros_like(v) + tl.load(c_ptr + row)
        for j in tl.static_range(1, k - 1):
            d = tl.load(c_ptr + j * B + row) - v * d
        gradient = v * ((d - 1.0) + d * v)
    tl.store(out_ptr + row * n + col, gradient * g, mask=col < n)
    lane = tl.arange(0, TP)
    at = tl.load(class_ptr + row * T + lane, mask=lane < T, other=-1) - first
    values = tl.load(in_top_ptr + row * T + lane, mask=lane < T, other=0.0)
    label = tl.load(label_ptr + row) - first
    tl.debug_barrier()  # these entries have been written by other threads
    tl.store(out_ptr + row * n + at, values * g, mask=(lane < T) & (at >= start) & (at < start + N) & (at < n))
    tl.store(out_ptr + row * n + label, g, mask=(label >= start) & (label < start + N) & (label < n))


@triton.jit
def largest_in_chunk(s_ptr, y, n, N: tl.constexpr):
    """The largest score but class y's."""
    best = tl.full((N,), float("-inf"), tl.float32)
    for start in range(0, n, N):
        best = tl.maximum(best, load_scores(s_ptr, y, start + tl.arange(0, N), n))
    return tl.max(best, 0)


@triton.jit
def next_in_chunk(s_ptr, y, v, i, n, N: tl.constexpr):
    """The largest score after v at i, ties in the order of classes, and its place; -inf and n where there is none."""
    best = tl.full((N,), float("-inf"), tl.float32)
    at = tl.zeros((N,), tl.int32) + n
    for start in range(0, n, N):
        col = start + tl.arange(0, N)
        s = load_scores(s_ptr, y, col, n)
        better = ((s < v) | ((s == v) & (col > i))) & (s > best)
        best = tl.where(better, s, best)
        at = tl.where(better, col, at)
    v = tl.max(best, 0)
    return v, tl.min(tl.where(best == v, at, n), 0)


@triton.jit
def load_scores(s_ptr, y, col, n):
    s = tl.load(s_ptr + col, mask=col < n, other=float("-inf")).to(tl.float32)
    return tl.where(col == y, float("-inf"), s)
