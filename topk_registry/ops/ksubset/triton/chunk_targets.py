# type: ignore
"""Triton kernels for the hinges of a chunk of classes, for a target that has a mass on many of them.

A class of the tail has odds w relative to the (k + 1)-th largest score and v = scale w, for which c is balanced. With
d = c / (1 + v X), e = d / (1 + v X), its margin is s - s_(k) + theta (shift + log d_{k-1} - log d_k), see
torch/all_classes.py. A mass q costs q times the hinge of the margin, and its slope g in the margin puts

    chain (-v)^(k-1-j) into the cotangent of c_j, -g / d_k into that of c_k,   chain = g (1 / d_{k-1} + v / d_k).

``sum_costs`` adds these up for the classes of a chunk, and ``chunk_slopes`` writes the gradient to its scores.

A target is a distribution in memory (``DENSE``), or M labels with shares beside a mass that all classes share
(``EVEN``).
"""

import triton
import triton.language as tl

from topk_registry.ops.gpu.arithmetic import LN2, exp, log2, reciprocal
from topk_registry.ops.ksubset.triton.hinge import gap_of

TOP = tl.constexpr(float("inf"))  # in the place of a top group's score: its margin is known


@triton.jit
def sum_costs(
    s_ptr, q_ptr, label_ptr, share_ptr, even_ptr, weight_ptr, alpha_ptr, class_ptr, in_top_ptr, kth_ptr, next_ptr,
    c_ptr, scale_ptr, shift_ptr, sums_ptr, B, n, first, theta, inverse, of_margin, tau, inverse_tau,
    k: tl.constexpr, T: tl.constexpr, TP: tl.constexpr, N: tl.constexpr, DENSE: tl.constexpr, SQ: tl.constexpr,
    M: tl.constexpr, EVEN: tl.constexpr, PER_CLASS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Add to sums [B, 1 + (k + 1) + T]: the costs of a chunk's classes, and the cotangents of c and of the top group's
    margins. Its scores in the top group are used up."""
    row = tl.program_id(0).to(tl.int64)
    s_ptr += row * n
    sums_ptr += row * (2 + k + T)
    q_ptr += row * SQ + first
    even, c, scale, shift, kth, after = of_row(
        even_ptr, c_ptr, scale_ptr, shift_ptr, kth_ptr, next_ptr, row, B, k, EVEN
    )

    lane = tl.arange(0, TP)
    held = lane < T
    at = tl.load(class_ptr + row * T + lane, mask=held, other=-1) - first
    here = held & (at >= 0) & (at < n)
    tl.store(s_ptr + at, tl.zeros((TP,), tl.float32) + TOP, mask=here)
    in_top = tl.load(in_top_ptr + row * T + lane, mask=here, other=0.0)
    at_top = mass(q_ptr, label_ptr, share_ptr, weight_ptr, even, row, at, here, first, DENSE, M, WEIGHTED)
    of_top, slopes = costs(in_top, at_top, alpha_ptr, first + at, here, of_margin, tau, inverse_tau, PER_CLASS)
    places = sums_ptr + 2 + k + lane
    tl.store(places, tl.load(places, mask=here, other=0.0) + slopes.to(tl.float64), mask=here)
    tl.debug_barrier()  # the scores of the top group have been marked by other threads

    total = tl.zeros((N,), tl.float32)
    of_last = tl.zeros((N,), tl.float32)
    of_c = ()
    for _ in tl.static_range(k):
        of_c = of_c + (tl.zeros((N,), tl.float32),)
    for start in range(0, n, N):
        col = start + tl.arange(0, N)
        wanted = DENSE or EVEN
        if not (DENSE or EVEN):  # most tiles have no label
            for m in tl.static_range(M):
                place = tl.load(label_ptr + row * M + m) - first - start
                wanted = wanted | ((place >= 0) & (place < N))
        if wanted:
            s = tl.load(s_ptr + col, mask=col < n, other=TOP).to(tl.float32)
            there = s != TOP
            q = mass(q_ptr, label_ptr, share_ptr, weight_ptr, even, row, col, there, first, DENSE, M, WEIGHTED)
            v, d, _e, last = polynomial(exp((s - after) * inverse), c, scale, k)
            margin = s - kth + theta * (shift + LN2 * log2(d * last))
            cost, g = costs(margin, q, alpha_ptr, first + col, there, of_margin, tau, inverse_tau, PER_CLASS)
            total += cost
            g_last = tl.where(there, -g * last, 0.0)
            chain = tl.where(there, g * reciprocal(d) - g_last * v, 0.0)
            of_last += g_last
            of_c = carried(of_c, chain, tl.where(there, v, 0.0), k)
    value = tl.sum(of_top, 0).to(tl.float64) + tl.sum(total, 0).to(tl.float64)
    tl.store(sums_ptr, tl.load(sums_ptr) + value)
    for j in tl.static_range(k):
        tl.store(sums_ptr + 1 + j, tl.load(sums_ptr + 1 + j) + tl.sum(of_c[j], 0).to(tl.float64))
    tl.store(sums_ptr + 1 + k, tl.load(sums_ptr + 1 + k) + tl.sum(of_last, 0).to(tl.float64))


@triton.jit
def chunk_slopes(
    s_ptr, q_ptr, label_ptr, share_ptr, even_ptr, weight_ptr, alpha_ptr, class_ptr, at_top_ptr, at_P_ptr, kth_ptr,
    next_ptr, c_ptr, scale_ptr, shift_ptr, g_ptr, B, n, first, theta, inverse, of_margin, tau, inverse_tau, sign,
    k: tl.constexpr, T: tl.constexpr, TP: tl.constexpr, N: tl.constexpr, DENSE: tl.constexpr, SQ: tl.constexpr,
    M: tl.constexpr, EVEN: tl.constexpr, PER_CLASS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a chunk's scores over the scores: of the tail through margins, c and the power sums, for
    the row's cotangent g of the costs and at_P of the power sums; of the top group as it is given."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * N
    col = start + tl.arange(0, N)
    s_ptr += row * n
    q_ptr += row * SQ + first
    even, c, scale, shift, kth, after = of_row(
        even_ptr, c_ptr, scale_ptr, shift_ptr, kth_ptr, next_ptr, row, B, k, EVEN
    )
    factor = tl.load(g_ptr + row)
    inside = col < n
    s = tl.load(s_ptr + col, mask=inside, other=float("-inf")).to(tl.float32)
    lane = tl.arange(0, TP)
    held = lane < T
    at = tl.load(class_ptr + row * T + lane, mask=held, other=-1) - first
    here = held & (at >= start) & (at < start + N) & (at < n)
    q = mass(q_ptr, label_ptr, share_ptr, weight_ptr, even, row, col, inside, first, DENSE, M, WEIGHTED)
    w = exp((s - after) * inverse)
    v, d, e, last = polynomial(w, c, scale, k)
    margin = s - kth + theta * (shift + LN2 * log2(d * last))
    _, g = costs(margin, q, alpha_ptr, first + col, inside, of_margin, tau, inverse_tau, PER_CLASS)
    g_last = -g * last
    chain = g * reciprocal(d) - g_last * v
    by_sums = tl.zeros((N,), tl.float32) + k * tl.load(at_P_ptr + (k - 1) * B + row)
    for j in tl.static_range(1, k):
        by_sums = by_sums * w + (k - j) * tl.load(at_P_ptr + (k - 1 - j) * B + row)
    slope = factor * g + w * (by_sums - factor * scale * (chain * e + g_last * d))
    tl.store(s_ptr + col, slope * sign, mask=inside)
    tl.debug_barrier()  # the top group's entries have been written by other threads
    at_top = tl.load(at_top_ptr + row * T + lane, mask=here, other=0.0)
    tl.store(s_ptr + at, at_top * sign, mask=here)


@triton.jit
def of_row(even_ptr, c_ptr, scale_ptr, shift_ptr, kth_ptr, next_ptr, row, B, k: tl.constexpr, EVEN: tl.constexpr):
    """The mass that each class has, the coefficients, their scale and shift, and the two references."""
    even = tl.zeros((), tl.float32)
    if EVEN:
        even += tl.load(even_ptr + row)
    c = ()
    for j in tl.static_range(k + 1):
        c = c + (tl.load(c_ptr + j * B + row),)
    return even, c, tl.load(scale_ptr + row), tl.load(shift_ptr + row), tl.load(kth_ptr + row), tl.load(next_ptr + row)


@triton.jit
def mass(
    q_ptr, label_ptr, share_ptr, weight_ptr, even, row, col, wanted, first,
    DENSE: tl.constexpr, M: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """The masses of classes col of a chunk, with their weights; 0 for classes that are not wanted."""
    if DENSE:
        q = tl.load(q_ptr + col, mask=wanted, other=0.0).to(tl.float32)
    else:
        q = tl.where(wanted, even, 0.0)
        for m in tl.static_range(M):
            label = (tl.load(label_ptr + row * M + m) - first).to(tl.int32)
            q += tl.where(wanted & (col == label), tl.load(share_ptr + row * M + m), 0.0)
    if WEIGHTED:
        q = q * tl.load(weight_ptr + first + col, mask=wanted, other=0.0)
    return q


@triton.jit
def polynomial(w, c, scale, k: tl.constexpr):
    """v, d_{k-1}, e_{k-2} and 1 / d_k of every class of the tail, from its odds."""
    v = w * scale
    d = tl.zeros_like(v) + c[0]
    e = tl.zeros_like(v)
    for j in tl.static_range(1, k):
        e = d - v * e
        d = c[j] - v * d
    return v, d, e, reciprocal(c[k] - v * d)


@triton.jit
def costs(margin, q, alpha_ptr, place, wanted, of_margin, tau, inverse_tau, PER_CLASS: tl.constexpr):
    """q tau log(1 + exp(x / tau)), x = alpha - of_margin margin, and its slope in the margin; 0 where q is."""
    alpha = gap_of(alpha_ptr, place, wanted, PER_CLASS)
    x = alpha - of_margin * margin
    small = exp(-tl.abs(x) * inverse_tau)
    u = 1.0 + small
    cost = tl.maximum(x, 0.0) + tau * (LN2 * log2(u) + (small - (u - 1.0)))  # with what rounding u has lost
    chance = tl.where(x > 0, 1.0, small) * reciprocal(u)
    counted = wanted & (q != 0.0)  # a class of no mass costs nothing, even where its margin is infinite
    return tl.where(counted, q * cost, 0.0), tl.where(counted, -of_margin * q * chance, 0.0)


@triton.jit
def carried(of_c, chain, v, k: tl.constexpr):
    """The cotangents of c_0..c_{k-1} with those of further classes."""
    sums = ()
    for j in tl.static_range(k):
        sums = (of_c[k - 1 - j] + chain,) + sums
        chain = -v * chain
    return sums
