# type: ignore
"""Triton kernels in passes, for every k and any row length.

``select`` finds the largest scores of a row, or of each segment of a longer one; ``sum_tail`` the power sums of the
others' odds. A *solve* kernel, one program a row, makes from that the few numbers that a *finish* kernel needs to write
its part of the row by Horner's rule. Logits are read three times.

A class belongs to the top group if its score is above the smallest one there, or equal to it and not behind it.

With ``SKIPS`` the rows that another kernel has done are left as they are.

A solve kernel leaves a row's ``state``: coefficients 0..k of the row's polynomial, then the factors that turn
exp((s - a) / theta), a the reference of a tilt, into odds.
"""

import triton
import triton.language as tl

from topk_registry.ops.ksubset.triton.hinge import store_margin
from topk_registry.ops.ksubset.triton.polynomial import (
    broadcast,
    chances,
    is_finite,
    lane_of,
    least_rest,
    newton,
    times,
)
from topk_registry.ops.ksubset.triton.select import from_keys, keys, largest, largest_below


@triton.jit
def load_scores(s_ptr, row, n, step, col):
    return tl.load(s_ptr + row * step + col, mask=col < n, other=float("-inf")).to(tl.float32)


@triton.jit
def is_done(done_ptr, row, SKIPS: tl.constexpr):
    done = row < 0
    if SKIPS:
        done = tl.load(done_ptr + row) != 0
    return done


@triton.jit
def select(
    s_ptr, label_ptr, done_ptr, top_ptr, where_ptr, n, step,
    T: tl.constexpr, N: tl.constexpr, WITHOUT_LABEL: tl.constexpr, SKIPS: tl.constexpr,
):  # fmt: skip
    """The T largest scores of a segment and their classes, largest first."""
    row = tl.program_id(0).to(tl.int64)
    if is_done(done_ptr, row, SKIPS):
        return
    first = tl.program_id(1) * N
    out = (row * tl.num_programs(1) + tl.program_id(1)) * T
    dtype: tl.constexpr = s_ptr.dtype.element_ty
    place = tl.arange(0, N)
    s = tl.load(s_ptr + row * step + first + place, mask=first + place < n, other=float("-inf"))
    s = tl.where(s == s, s, float("-inf"))  # sum_tail reports NaN
    if WITHOUT_LABEL:
        s = tl.where(first + place == tl.load(label_ptr + row), float("-inf"), s)
    if dtype == tl.float32:
        for f in range(T):
            v, i, s = largest(s, place)
            tl.store(top_ptr + out + f, v)
            tl.store(where_ptr + out + f, first + i)
    else:
        key = keys(s.to(dtype), place)
        largest_left = largest_below(key, 2147483647)
        for f in range(T):
            v, i = from_keys(largest_left, dtype)
            tl.store(top_ptr + out + f, tl.where(largest_left > -2147483648, v, float("-inf")))
            tl.store(where_ptr + out + f, first + i)
            largest_left = largest_below(key, largest_left)


@triton.jit
def sum_tail(
    s_ptr, label_ptr, done_ptr, top_ptr, where_ptr, sums_ptr, n, step, inverse,
    k: tl.constexpr, T: tl.constexpr, N: tl.constexpr, REFERENCE: tl.constexpr, WITHOUT_LABEL: tl.constexpr,
    SKIPS: tl.constexpr,
):  # fmt: skip
    """P_1..P_k of the tail's odds exp((s - a) / theta) in a part of the row, a of the given rank; NaN for a NaN."""
    row = tl.program_id(0).to(tl.int64)
    if is_done(done_ptr, row, SKIPS):
        return
    col = tl.program_id(1) * N + tl.arange(0, N)
    s = load_scores(s_ptr, row, n, step, col)
    outside = in_top_group(s, col, top_ptr, where_ptr, row, T)
    if WITHOUT_LABEL:
        outside = outside | (col == tl.load(label_ptr + row))
    a = tl.load(top_ptr + row * T + REFERENCE)
    w = tl.where(outside, 0.0, tl.exp((s - a) * inverse))
    power = w
    sums_ptr += (row * tl.num_programs(1) + tl.program_id(1)) * k
    for j in range(k):
        tl.store(sums_ptr + j, tl.sum(power, 0))
        power = power * w


@triton.jit
def in_top_group(s, col, top_ptr, where_ptr, row, T: tl.constexpr):
    r = tl.load(top_ptr + row * T + T - 1)
    last = tl.load(where_ptr + row * T + T - 1)
    return (s > r) | ((s == r) & (col <= last))


@triton.jit
def scatter_top(
    out_ptr, values_ptr, top_ptr, where_ptr, row, step, first, T: tl.constexpr, TP: tl.constexpr, N: tl.constexpr
):
    """Write the top group's values over what other threads of this program have written to its segment."""
    tl.debug_barrier()
    lane = tl.arange(0, TP)
    held = lane < T
    at = tl.load(where_ptr + row * T + lane, mask=held, other=-1)
    real = tl.load(top_ptr + row * T + lane, mask=held, other=float("-inf")) > float("-inf")
    values = tl.load(values_ptr + row * T + lane, mask=held)
    tl.store(out_ptr + row * step + at, values, mask=held & real & (at >= first) & (at < first + N))


@triton.jit
def solve_label(
    s_ptr, label_ptr, done_ptr, top_ptr, sums_ptr, b_ptr, value_ptr, state_ptr, in_top_ptr, n, step,
    theta, theta_low, inverse,
    alpha_ptr, weight_ptr, share_ptr, scale, scale_low, tau, inverse_tau, inverse_tau_low, factor,
    HINGE: tl.constexpr, PER_CLASS: tl.constexpr, WEIGHTED: tl.constexpr, SHARED: tl.constexpr,
    k: tl.constexpr, T: tl.constexpr, TP: tl.constexpr, KP: tl.constexpr, SKIPS: tl.constexpr,
):  # fmt: skip
    """The margin, the gradient at the top group, and the coefficients, tilted so that c_{k-1} = c_k = 1."""
    row = tl.program_id(0).to(tl.int64)
    if is_done(done_ptr, row, SKIPS):
        return
    lane = tl.arange(0, TP)
    top_ptr += row * T
    top = tl.load(top_ptr + lane, mask=lane < T, other=float("-inf"))
    y = tl.load(label_ptr + row)
    s_y = tl.load(s_ptr + row * step + y, mask=(y >= 0) & (y < n), other=float("nan")).to(tl.float32)
    a = tl.load(top_ptr + k - 1)
    mass = tl.load(sums_ptr + row * k)
    broken = (is_finite(a) == 0) | (s_y != s_y) | (mass != mass)

    least = least_rest((top - a) * inverse, mass, lane, k)
    b_ptr += row * 2 * KP
    newton(sums_ptr + row * k, 1.0 / least, b_ptr + KP, b_ptr, k, KP)
    c = broadcast(b_ptr, tl.zeros((TP,), tl.float32), k + 1)
    for f in range(T):
        q, p = chances((tl.load(top_ptr + f) - a) * inverse, least)
        c = times(c, tl.where(lane == f, 1.0, q), tl.where(lane == f, 0.0, p), k)
    below = lane_of(c[k - 1], lane, T)
    last = lane_of(c[k], lane, T)
    ratio = below / last

    of_margin = store_margin(
        row, row >= 0, y, s_y, a, ratio, 1.0 / least, theta, theta_low, broken, value_ptr,
        alpha_ptr, weight_ptr, share_ptr, scale, scale_low, tau, inverse_tau, inverse_tau_low, factor,
        HINGE, PER_CLASS, WEIGHTED, SHARED,
    )  # fmt: skip
    of_margin = tl.where(broken, float("nan"), of_margin)
    _, p = chances((top - a) * inverse, least)
    in_top = -c[k - 1] / last
    if k > 1:
        in_top += c[k - 2] / below
    tl.store(in_top_ptr + row * T + lane, p * in_top * of_margin, mask=lane < T)
    state_ptr += row * (k + 3)
    back = 1.0 / ratio
    rho = 1.0 / last
    tl.store(state_ptr + k + 1, ratio / least)
    tl.store(state_ptr + k + 2, of_margin)
    for j in tl.static_range(k + 1):
        tl.store(state_ptr + k - j + lane * 0, c[k - j] * rho, mask=lane == T)
        rho = rho * back


@triton.jit
def finish_label(
    s_ptr, label_ptr, done_ptr, top_ptr, where_ptr, state_ptr, in_top_ptr, gradient_ptr, n, step, inverse,
    k: tl.constexpr, T: tl.constexpr, TP: tl.constexpr, N: tl.constexpr, SKIPS: tl.constexpr,
):  # fmt: skip
    """The gradient v (d_{k-2} (1 + v) - 1), v the balanced odds, d = c / (1 + v X)."""
    row = tl.program_id(0).to(tl.int64)
    if is_done(done_ptr, row, SKIPS):
        return
    first = tl.program_id(1) * N
    col = first + tl.arange(0, N)
    s = load_scores(s_ptr, row, n, step, col)
    state_ptr += row * (k + 3)
    a = tl.load(top_ptr + row * T + k - 1)
    factor = tl.load(state_ptr + k + 1)
    of_margin = tl.load(state_ptr + k + 2)  # NaN where the row is broken
    y = tl.load(label_ptr + row)
    outside = in_top_group(s, col, top_ptr, where_ptr, row, T) | (col == y)
    v = tl.where(outside, 0.0, tl.exp((s - a) * inverse)) * factor
    gradient = -v
    if k > 1:
        d = tl.zeros_like(v) + tl.load(state_ptr)
        for j in tl.static_range(1, k - 1):
            d = tl.load(state_ptr + j) - v * d
        gradient = v * (d * (1.0 + v) - 1.0)
    gradient = tl.where(col == y, 1.0, gradient) * of_margin
    tl.store(gradient_ptr + row * step + col, gradient, mask=col < n)
    scatter_top(gradient_ptr, in_top_ptr, top_ptr, where_ptr, row, step, first, T, TP, N)
