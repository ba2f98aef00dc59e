# type: ignore
"""Triton kernels for the margins of every class, and for their vector-Jacobian product.

Leaving out one of the k largest classes needs the tilt for k + 1 (torch/rows.py): there are two *families*, the k
largest classes with the second tilt, all others with the first. The state of a row holds coefficients 0..k without the
tilt's family that leaves nothing out, divided by c_k; then exp(t) of either tilt, and c_k.

The product with cotangents g is a sum over all classes. The margin of class i depends on all others through the
polynomial E without i, d(theta l_i) / dx_j = w_j [X^{k-1}] (X / E_{k-1} - 1 / E_k) E / (1 + w_j X). So class i puts
alpha_i X + beta_i, alpha_i = g_i / E_{k-1}, beta_i = -g_i / E_k, in the place of its own factor, and class j wants
coefficient k-1 of that sum, leaving out its own factor. In the tail, where the polynomial without i is
c / (1 + w_i X), all of them together are c W with W_r = sum_i beta_i (-w_i)^r + alpha_i (-w_i)^{r-1}. A lane of the top
group carries along E and F, the sum so far: with a factor q + p X and its alpha X + beta

    F <- (q + p X) F + (alpha X + beta) E,    E <- (q + p X) E.
"""

import triton
import triton.language as tl

from topk_registry.ops.ksubset.triton.passes import in_top_group, is_done, load_scores, scatter_top
from topk_registry.ops.ksubset.triton.polynomial import (
    broadcast,
    chances,
    convolve,
    is_finite,
    lane_of,
    least_rest,
    newton,
    times,
)


@triton.jit
def solve_margins(
    done_ptr, top_ptr, where_ptr, sums_ptr, b_ptr, g_ptr, state_ptr, in_top_ptr, cotangents_ptr, n, theta, inverse,
    k: tl.constexpr, T: tl.constexpr, TP: tl.constexpr, KP: tl.constexpr, BACKWARD: tl.constexpr, SKIPS: tl.constexpr,
):  # fmt: skip
    """The margins of the top group, or for the backward pass its alpha and beta; and the state."""
    row = tl.program_id(0).to(tl.int64)
    if is_done(done_ptr, row, SKIPS):
        return
    lane = tl.arange(0, TP)
    top = tl.load(top_ptr + row * T + lane, mask=lane < T, other=float("-inf"))
    sums_ptr += row * k
    kth = tl.load(top_ptr + row * T + k - 1)
    after = tl.load(top_ptr + row * T + k)
    mass = tl.load(sums_ptr)
    broken = (is_finite(kth) == 0) | (is_finite(after) == 0) | (mass != mass)

    to_kth = tl.exp((after - kth) * inverse)  # the tail's odds are relative to the score after the k-th
    least_kth = least_rest((top - kth) * inverse, mass * to_kth, lane, k)
    least_after = least_rest((top - after) * inverse, mass, lane, k + 1)
    second = lane < k
    least = tl.where(second, least_after, least_kth)
    b_ptr += row * 4 * KP
    newton(sums_ptr, to_kth / least_kth, b_ptr + 2 * KP, b_ptr, k, KP)
    newton(sums_ptr, 1.0 / least_after, b_ptr + 3 * KP, b_ptr + KP, k, KP)
    e = ()
    for j in tl.static_range(k + 1):
        e = e + (tl.where(second, tl.load(b_ptr + KP + j), tl.load(b_ptr + j)),)
    reference = tl.where(second, after, kth)
    for f in range(T):
        q, p = chances((tl.load(top_ptr + row * T + f) - reference) * inverse, least)
        e = times(e, tl.where(lane == f, 1.0, q), tl.where(lane == f, 0.0, p), k)

    last = lane_of(e[k], lane, T)
    state_ptr += row * (k + 4)
    for j in tl.static_range(k + 1):
        tl.store(state_ptr + j + lane * 0, tl.where(broken, float("nan"), e[j] / last), mask=lane == T)
    tl.store(state_ptr + k + 1, least_kth)
    tl.store(state_ptr + k + 2, least_after)
    tl.store(state_ptr + k + 3, last)
    if BACKWARD:
        at = tl.load(where_ptr + row * T + lane, mask=lane < T, other=0)
        real = top > float("-inf")
        g = tl.load(g_ptr + row * n + at, mask=(lane < T) & real, other=0.0).to(tl.float32)
        tl.store(cotangents_ptr + row * 2 * T + lane, tl.where(real, g / e[k - 1], 0.0), mask=lane < T)
        tl.store(cotangents_ptr + row * 2 * T + T + lane, tl.where(real, -g / e[k], 0.0), mask=lane < T)
    else:
        margin = (top - reference) + theta * (tl.log(e[k - 1] / e[k]) - tl.log(least))
        tl.store(in_top_ptr + row * T + lane, tl.where(broken, float("nan"), margin), mask=lane < T)


@triton.jit
def finish_margins(
    s_ptr, done_ptr, top_ptr, where_ptr, state_ptr, in_top_ptr, out_ptr, n, step, theta, inverse,
    k: tl.constexpr, T: tl.constexpr, TP: tl.constexpr, N: tl.constexpr, SKIPS: tl.constexpr,
):  # fmt: skip
    """(s - a) + theta (log(d_{k-1} / d_k) - t), d = c / (1 + w X)."""
    row = tl.program_id(0).to(tl.int64)
    if is_done(done_ptr, row, SKIPS):
        return
    first = tl.program_id(1) * N
    col = first + tl.arange(0, N)
    s = load_scores(s_ptr, row, n, step, col)
    state_ptr += row * (k + 4)
    least = tl.load(state_ptr + k + 1)
    outside = in_top_group(s, col, top_ptr, where_ptr, row, T)
    u = s - tl.load(top_ptr + row * T + k - 1)
    w = tl.where(outside, 0.0, tl.exp(u * inverse)) / least
    d = tl.zeros_like(w) + tl.load(state_ptr)
    for j in tl.static_range(1, k):
        d = tl.load(state_ptr + j) - w * d
    last = tl.load(state_ptr + k) - w * d
    tl.store(out_ptr + row * n + col, u + theta * (tl.log(d / last) - tl.log(least)), mask=col < n)
    scatter_top(out_ptr, in_top_ptr, top_ptr, where_ptr, row, n, first, T, TP, N)


@triton.jit
def sum_cotangents(
    s_ptr, done_ptr, g_ptr, top_ptr, where_ptr, state_ptr, W_ptr, n, step, inverse,
    k: tl.constexpr, T: tl.constexpr, N: tl.constexpr, SKIPS: tl.constexpr,
):  # fmt: skip
    """W_0..W_{k-1} of a segment's tail classes."""
    row = tl.program_id(0).to(tl.int64)
    if is_done(done_ptr, row, SKIPS):
        return
    segment = tl.program_id(1)
    col = segment * N + tl.arange(0, N)
    s = load_scores(s_ptr, row, n, step, col)
    g = tl.load(g_ptr + row * n + col, mask=col < n, other=0.0).to(tl.float32)
    state_ptr += row * (k + 4)
    outside = in_top_group(s, col, top_ptr, where_ptr, row, T)
    a = tl.load(top_ptr + row * T + k - 1)
    w = tl.where(outside, 0.0, tl.exp((s - a) * inverse)) / tl.load(state_ptr + k + 1)
    g = tl.where(outside, 0.0, g)
    d = tl.zeros_like(w) + tl.load(state_ptr)
    for j in tl.static_range(1, k):
        d = tl.load(state_ptr + j) - w * d
    term = -g / (tl.load(state_ptr + k) - w * d)
    W_ptr += (row * tl.num_programs(1) + segment) * k
    tl.store(W_ptr, tl.sum(term, 0))
    if k > 1:
        term = g / d - w * term
        for r in range(1, k):
            tl.store(W_ptr + r, tl.sum(term, 0))
            term = -w * term


@triton.jit
def with_cotangents(F, e, q, p, alpha, beta, degree: tl.constexpr):
    """Coefficients 0..degree of (q + p X) F + (alpha X + beta) e."""
    out = (q * F[0] + beta * e[0],)
    for j in tl.static_range(1, degree + 1):
        out = out + (q * F[j] + p * F[j - 1] + (beta * e[j] + alpha * e[j - 1]),)
    return out


@triton.jit
def solve_cotangents(
    done_ptr, top_ptr, where_ptr, b_ptr, W_ptr, cotangents_ptr, g_ptr, state_ptr, H_ptr, in_top_ptr, n, inverse,
    k: tl.constexpr, T: tl.constexpr, TP: tl.constexpr, KP: tl.constexpr, SKIPS: tl.constexpr,
):  # fmt: skip
    """A family's share of the product at the top group, and its F where nothing is left out; a program a family."""
    row = tl.program_id(0).to(tl.int64)
    if is_done(done_ptr, row, SKIPS):
        return
    family = tl.program_id(1)  # 1: the k largest
    lane = tl.arange(0, TP)
    top_ptr += row * T
    cotangents_ptr += row * 2 * T
    state_ptr += row * (k + 4)
    H_ptr += (row * 2 + family) * k
    b_ptr += (row * 4 + family) * KP
    reference = tl.load(top_ptr + k - 1 + family)
    least = tl.load(state_ptr + k + 1 + family)
    top = tl.load(top_ptr + lane, mask=lane < T, other=float("-inf"))
    tail = tl.where(family == 0, 1.0 / tl.load(state_ptr + k + 3), 0.0)  # all of the tail is in the first family
    convolve(W_ptr + row * k, b_ptr, tail, H_ptr, k, KP)

    zero = tl.zeros((TP,), tl.float32)
    e = broadcast(b_ptr, zero, k)
    F = broadcast(H_ptr, zero, k)
    for f in range(T):
        q, p = chances((tl.load(top_ptr + f) - reference) * inverse, least)
        here = tl.where((f < k) == (family == 1), 1.0, 0.0)
        alpha = tl.where(lane == f, 0.0, tl.load(cotangents_ptr + f) * here)
        beta = tl.where(lane == f, 0.0, tl.load(cotangents_ptr + T + f) * here)
        q = tl.where(lane == f, 1.0, q)
        p = tl.where(lane == f, 0.0, p)
        F = with_cotangents(F, e, q, p, alpha, beta, k - 1)
        e = times(e, q, p, k - 1)

    _, p = chances((top - reference) * inverse, least)
    at = tl.load(where_ptr + row * T + lane, mask=lane < T, other=0)
    own = (lane < T) & (top > float("-inf")) & ((lane < k) == (family == 1))
    product = p * F[k - 1] + tl.load(g_ptr + row * n + at, mask=own, other=0.0).to(tl.float32)
    tl.store(in_top_ptr + (row * 2 + family) * T + lane, product, mask=lane < T)
    tl.debug_barrier()  # every thread has read where F started
    for j in tl.static_range(k):
        tl.store(H_ptr + j + lane * 0, F[j], mask=lane == T)


@triton.jit
def finish_cotangents(
    s_ptr, done_ptr, g_ptr, top_ptr, where_ptr, state_ptr, H_ptr, in_top_ptr, out_ptr, n, step, out_step, inverse,
    k: tl.constexpr, T: tl.constexpr, TP: tl.constexpr, N: tl.constexpr, SKIPS: tl.constexpr,
):  # fmt: skip
    """The product at the tail: all cotangents divided by 1 + w X, less the class's own."""
    row = tl.program_id(0).to(tl.int64)
    if is_done(done_ptr, row, SKIPS):
        return
    first = tl.program_id(1) * N
    col = first + tl.arange(0, N)
    s = load_scores(s_ptr, row, n, step, col)
    g = tl.load(g_ptr + row * n + col, mask=col < n, other=0.0).to(tl.float32)
    state_ptr += row * (k + 4)
    H_ptr += row * 2 * k
    outside = in_top_group(s, col, top_ptr, where_ptr, row, T)
    kth = tl.load(top_ptr + row * T + k - 1)
    after = tl.load(top_ptr + row * T + k)
    w = tl.where(outside, 0.0, tl.exp((s - kth) * inverse)) / tl.load(state_ptr + k + 1)
    w_after = tl.where(outside, 0.0, tl.exp((s - after) * inverse)) / tl.load(state_ptr + k + 2)
    zero = tl.zeros_like(w)
    h = zero + tl.load(H_ptr)
    h_after = zero + tl.load(H_ptr + k)
    d = zero + tl.load(state_ptr)  # d_0, with e_{-1} = 0
    e = zero
    for j in tl.static_range(1, k):
        h = tl.load(H_ptr + j) - w * h
        h_after = tl.load(H_ptr + k + j) - w_after * h_after
        e = d - w * e
        d = tl.load(state_ptr + j) - w * d
    last = tl.load(state_ptr + k) - w * d
    own = g / d * e - g / last * (d - w * e)
    tl.store(out_ptr + row * out_step + col, g + w * (h - own) + w_after * h_after, mask=col < n)
    scatter_top(out_ptr, in_top_ptr, top_ptr, where_ptr, row, out_step, first, T, TP, N)
