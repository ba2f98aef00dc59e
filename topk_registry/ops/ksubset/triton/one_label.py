# type: ignore
"""The margin of each row's label and its gradient in one Triton kernel, for rows that fit into a program's registers.

The logits are read once and the gradient is written once. The top group is a tuple of numbers that every thread holds,
so that all that depends on it alone (tilt, factors, coefficients) is computed in every thread and never exchanged.
"""

import triton
import triton.language as tl

from topk_registry.ops.ksubset.triton.hinge import store_margin
from topk_registry.ops.ksubset.triton.polynomial import (
    CAP,
    chances,
    is_finite,
    tail_polynomial,
    times,
)
from topk_registry.ops.ksubset.triton.select import from_keys, keys, largest, largest_below


@triton.jit
def label_rows(
    s_ptr,
    label_ptr,
    margin_ptr,
    gradient_ptr,
    n,
    theta,
    theta_low,
    inverse,
    alpha_ptr,
    value_ptr,
    slope_ptr,
    scale,
    scale_low,
    tau,
    tau_low,
    HINGE: tl.constexpr,
    PER_CLASS: tl.constexpr,
    k: tl.constexpr,
    T: tl.constexpr,
    TP: tl.constexpr,
    N: tl.constexpr,
):
    """Margin and gradient of a row that stays in registers: the logits are read once, the gradient is written once."""
    row = tl.program_id(0).to(tl.int64)
    s_ptr += row * n
    gradient_ptr += row * n
    col = tl.arange(0, N)
    lane = tl.arange(0, TP)
    y = tl.load(label_ptr + row)
    known = (y >= 0) & (y < n)
    s = tl.load(s_ptr + col, mask=col < n, other=float("-inf")).to(tl.float32)
    s_y = tl.load(s_ptr + y, mask=known, other=float("nan")).to(tl.float32)
    broken = (tl.max((s != s).to(tl.int32), 0) > 0) | (s_y != s_y)

    s = tl.where((col == y) | (s != s), float("-inf"), s)
    dtype: tl.constexpr = s_ptr.dtype.element_ty
    if dtype != tl.float32:
        key = keys(s.to(dtype), col)
        found = largest_below(key, 2147483647)
    top = ()
    where = tl.full((TP,), -1, tl.int32)
    for f in tl.static_range(T):
        if dtype == tl.float32:
            v, i, s = largest(s, col)
        else:
            v, i = from_keys(found, dtype)
            v = tl.where(found > -2147483648, v, float("-inf"))
            if f < T - 1:
                found = largest_below(key, found)
        where = tl.where(lane == f, tl.where(v > float("-inf"), i, -1), where)
        top = top + (v,)
    a = top[k - 1]
    broken = broken | (is_finite(a) == 0)
    if dtype != tl.float32:
        s, _ = from_keys(key, dtype)
        s = tl.where(key < found, s, float("-inf"))
    w = tl.exp((s - a) * inverse)

    mass = tl.sum(w, 0)
    R = mass
    least = mass
    for step in tl.static_range(T):
        R += tl.exp(tl.minimum((top[T - 1 - step] - a) * inverse, CAP))
        if step == T - k:
            least = R
        if step > T - k:
            least = tl.minimum(least, R / (step - (T - k) + 1))
    base = 1.0 / least

    P = (mass * base,)
    power = w
    factor = base
    for _ in tl.static_range(1, k):
        power = power * w
        factor = factor * base
        P = P + (tl.sum(power, 0) * factor,)
    c = tail_polynomial(P, k)
    none = tl.zeros((TP,), tl.float32)
    e = ()
    for j in tl.static_range(k):
        e = e + (none + c[j],)
    p_lane = none
    for f in tl.static_range(T):
        q, p = chances((top[f] - a) * inverse, least)
        c = times(c, q, p, k)
        e = times(e, tl.where(lane == f, 1.0, q), tl.where(lane == f, 0.0, p), k - 1)
        p_lane = tl.where(lane == f, p, p_lane)
    in_top = -e[k - 1] / c[k]
    if k > 1:
        in_top += e[k - 2] / c[k - 1]

    ratio = c[k - 1] / c[k]
    v = w * (base * ratio)
    gradient = -v
    if k > 1:
        # tilted on so that coefficients k-1 and k are both 1: d_{k-2} - d_{k-1} = d_{k-2} (1 + v) - 1
        back = 1.0 / ratio
        rho = back * back / c[k]
        balanced = ()
        for j in tl.static_range(2, k + 1):
            balanced = (c[k - j] * rho,) + balanced
            rho = rho * back
        d = tl.zeros_like(v) + balanced[0]
        for j in tl.static_range(1, k - 1):
            d = balanced[j] - v * d
        gradient = v * (d * (1.0 + v) - 1.0)
    gradient = tl.where(col == y, 1.0, gradient)
    tl.store(gradient_ptr + col, tl.where(broken, float("nan"), gradient), mask=col < n)
    tl.debug_barrier()  # the top group's entries have been written with odds of zero, by other threads
    in_top = tl.where(broken, float("nan"), in_top * p_lane)
    tl.store(gradient_ptr + where, in_top, mask=where >= 0)
    store_margin(
        row, y, s_y, a, ratio, least, theta, theta_low, broken, margin_ptr,
        alpha_ptr, value_ptr, slope_ptr, scale, scale_low, tau, tau_low, HINGE, PER_CLASS,
    )  # fmt: skip
