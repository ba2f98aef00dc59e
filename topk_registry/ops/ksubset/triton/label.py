# type: ignore
"""The smooth top-k loss of rows with one label each, and its gradient, in one Triton kernel.

A class with the score s has the odds w = exp((s - a) / theta) and the factor 1 + w X. The number a is one of the scores
of the row, and theta is the temperature. The margin of the label follows from the product of the factors of all other
classes. If no softmax probability of a row exceeds 1 / (2 k), the row is called flat. A flat row needs three passes:
for the largest score, for sums of powers of the odds, and for the gradient. In any other row, :func:`rows.top_group`
finds the classes with large odds one by one, and their factors are multiplied one by one.
"""

import triton
import triton.language as tl

from topk_registry.ops.gpu.arithmetic import LOG2E, exp2
from topk_registry.ops.gpu.tiles import aligned, clear, others, store, tiles_and_largest
from topk_registry.ops.ksubset.triton.hinge import store_hinge
from topk_registry.ops.ksubset.triton.polynomial import lane_of, probabilities, tail_polynomial, times
from topk_registry.ops.ksubset.triton.rows import (
    add,
    balanced,
    columns,
    flat_rows,
    powers,
    tail_odds,
    tail_powers,
    top_group,
)


@triton.jit
def label_rows(
    s_ptr, label_ptr, share_ptr, alpha, value_ptr, gradient_ptr, B, depth, theta, theta_low, inverse,
    tau, inverse_tau, inverse_tau_low,
    ALPHA: tl.constexpr, n: tl.constexpr, S: tl.constexpr, k: tl.constexpr, TP: tl.constexpr, R: tl.constexpr,
    N: tl.constexpr, TILES: tl.constexpr, CACHED: tl.constexpr, VECTOR: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """Write the loss share * tau * softplus((alpha_y - m_y / k) / tau) of each row, and its gradient.

    y is the label of the row. The margin m_y is the score of the label minus the k-th largest score of the other
    classes, smoothed with temperature theta. If the share is 0, the loss and the gradient are 0.

    Args:
        s_ptr: scores, B rows of n numbers with the distance S between rows.
        label_ptr, share_ptr: label and share of each row [B]. The share is the mass of the label.
        alpha: required margin, see :func:`hinge.gap_of`.
        value_ptr: output, losses [B].
        gradient_ptr: output, gradient in the memory layout of the scores.
        depth: k, but not a constant. The compiler would unroll loops over a constant, and run out of registers.
        theta, theta_low, inverse: k tau as the sum of two numbers in single precision, and the reciprocal of k tau.
        tau, inverse_tau, inverse_tau_low: smoothing temperature, and 1 / tau as the sum of two such numbers.
        TP: power of two, length of the vectors that have one entry per class with large odds.
        R, N, TILES, CACHED, VECTOR, SHIFTED: tiles of a program, see :mod:`topk_registry.ops.gpu.tiles`.
    """
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    there = row < B
    share = tl.load(share_ptr + row, mask=there, other=0.0).to(tl.float32)
    live = there & (share != 0.0)
    y, s_y = label_and_score(s_ptr, label_ptr, row, live, n, S)
    start, shift = aligned(row, S, VECTOR)
    scores_ptr = s_ptr + start
    steep = inverse * LOG2E

    cached, a = tiles_and_largest(scores_ptr, live, y, shift, n, R, N, TILES, CACHED, SHIFTED)

    if CACHED:
        odds = ()
        for tile in tl.static_range(TILES):
            odds = odds + (exp2((cached[tile] - a[:, None]) * steep),)
        sums = powers(odds[0], k)
        for tile in tl.static_range(1, TILES):
            sums = add(sums, powers(odds[tile], k), k)
    else:
        sums = powers(tl.zeros((R, N), tl.float32), k)
        for tile in tl.range(TILES, loop_unroll_factor=2):
            w = exp2((others(scores_ptr, live, y, shift, tile, n, R, N, SHIFTED) - a[:, None]) * steep)
            sums = add(sums, powers(w, k), k)
    flat, base, c = flat_rows(sums, live & (s_y == s_y), k)
    ratio = c[k - 1] / c[k]
    of_margin = store_hinge(
        row, flat, y, s_y, a, ratio, base, share, theta, theta_low, flat == 0, value_ptr, alpha,
        tau, inverse_tau, inverse_tau_low, k, ALPHA,
    )  # fmt: skip

    if tl.max(flat.to(tl.int32), 0) > 0:
        balanced_c = columns(balanced(c, 1.0 / ratio, of_margin, k), k - 1)
        tilt = (base * ratio)[:, None]
        if CACHED:
            for tile in tl.static_range(TILES):
                value = gradient(odds[tile] * tilt, balanced_c, of_margin[:, None], k - 1)
                store(gradient_ptr + start, value, flat, shift, tile, n, R, N, SHIFTED)
        else:
            for tile in tl.range(TILES, loop_unroll_factor=2):
                u = (others(scores_ptr, live, y, shift, tile, n, R, N, SHIFTED) - a[:, None]) * steep
                value = gradient(exp2(u + tl.log2(tilt)), balanced_c, of_margin[:, None], k - 1)
                store(gradient_ptr + start, value, flat, shift, tile, n, R, N, SHIFTED)
        tl.debug_barrier()  # wait until other threads have written 0 for the label
        tl.store(gradient_ptr + row * S + y, of_margin, mask=flat)

    for r in range(R):
        here = tl.program_id(0).to(tl.int64) * R + r
        if tl.sum(tl.where((row == here) & live & (flat == 0), 1, 0), 0) > 0:
            search_row(
                s_ptr, label_ptr, share_ptr, alpha, value_ptr, gradient_ptr, here, depth, theta, theta_low, inverse,
                tau, inverse_tau, inverse_tau_low, ALPHA, n, S, k, TP, N, TILES, VECTOR, SHIFTED,
            )  # fmt: skip
    empty = there & (live == 0)
    if tl.max(empty.to(tl.int32), 0) > 0:
        clear(value_ptr, gradient_ptr + start, row, shift, empty, n, R, N, TILES, SHIFTED)


@triton.jit
def search_row(
    s_ptr, label_ptr, share_ptr, alpha, value_ptr, gradient_ptr, here, depth, theta, theta_low, inverse,
    tau, inverse_tau, inverse_tau_low,
    ALPHA: tl.constexpr, n: tl.constexpr, S: tl.constexpr, k: tl.constexpr, TP: tl.constexpr,
    N: tl.constexpr, TILES: tl.constexpr, VECTOR: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """Compute the loss and the gradient of row ``here``. The arguments are as in :func:`label_rows`.

    ``label_rows`` calls this function for rows with a softmax probability above 1 / (2 k), and for invalid rows. A row
    is invalid if it contains NaN, if its label is out of range, or if fewer than k other scores are above -inf.
    """
    label, s_y = label_and_score(s_ptr, label_ptr, here, here >= 0, n, S)
    share = tl.load(share_ptr + here).to(tl.float32)
    # The row is read from memory in each pass, because a row in registers would take registers from other rows.
    row = here + tl.arange(0, 1)  # all other values are scalars, so that the compiler can choose the layout of lanes
    live = row >= 0
    y = label + tl.zeros((1,), tl.int32)
    start, shift = aligned(row, S, VECTOR)
    scores_ptr = s_ptr + start
    lane = tl.arange(0, TP)
    tiles = TILES + depth - k
    top, where, size, a, u, v, i, broken = top_group(
        scores_ptr, live, y, shift, s_y == s_y, depth, inverse, k, TP, TP, n, N, TILES, SHIFTED
    )
    x = (top - a) * inverse
    P = tail_powers(scores_ptr, live, y, shift, a, u, v, i, inverse, tiles, k, n, N, SHIFTED)
    b = tail_polynomial(P, k)
    e = ()
    for j in tl.static_range(k + 1):
        e = e + (b[j] + tl.zeros((TP,), tl.float32),)
    for f in range(size):
        q, p = probabilities(lane_of(x, lane, f), 1.0 / u)
        e = times(e, tl.where(lane == f, 1.0, q), tl.where(lane == f, 0.0, p), k)
    c = ()
    for j in tl.static_range(k + 1):
        c = c + (lane_of(e[j], lane, TP - 1),)  # the last lane is the whole product
    ratio = c[k - 1] / c[k]
    of_margin = store_hinge(
        here, here >= 0, label, s_y, a, ratio, u, share, theta, theta_low, broken, value_ptr, alpha,
        tau, inverse_tau, inverse_tau_low, k, ALPHA,
    )  # fmt: skip
    of_margin = tl.where(broken, float("nan"), of_margin)

    balanced_c = balanced(c, 1.0 / ratio, of_margin, k)
    tilt = u * ratio
    for tile in range(tiles):
        odds = tail_odds(scores_ptr, live, y, shift, tile, a, v, i, inverse, n, N, SHIFTED)
        value = gradient(odds * tilt, balanced_c, of_margin, k - 1)
        store(gradient_ptr + start, value, live, shift, tile, n, 1, N, SHIFTED)
    _, p = probabilities(x, 1.0 / u)
    in_top = -e[k - 1] / c[k]
    if k > 1:
        in_top += e[k - 2] / c[k - 1]
    tl.debug_barrier()  # wait until other threads have written 0 for the classes of the top group
    tl.store(gradient_ptr + here * S + where, of_margin * (p * in_top), mask=(lane < size) & (where < n))
    tl.store(gradient_ptr + here * S + label, of_margin, mask=label >= 0)
    if broken & (a == float("-inf")):  # too few scores are above -inf
        write_certain_row(s_ptr, label_ptr, value_ptr, gradient_ptr, here, depth, n, S, N)


@triton.jit
def write_certain_row(
    s_ptr, label_ptr, value_ptr, gradient_ptr, here, depth, n: tl.constexpr, S: tl.constexpr, N: tl.constexpr
):
    """Write the results of row ``here``, which has at most k scores above -inf.

    The gradient is 0. The loss is inf if the label's score is -inf, else 0. If the row contains NaN, or the
    label is out of range, nothing is written.
    """
    _, s_y = label_and_score(s_ptr, label_ptr, here, here >= 0, n, S)
    stop = n + depth - depth
    bad = tl.zeros((N,), tl.int32)
    for first in range(0, stop, N):
        col = first + tl.arange(0, N)
        s = tl.load(s_ptr + here * S + col, mask=col < n, other=0.0).to(tl.float32)
        bad = bad | (s != s).to(tl.int32)
    if (tl.max(bad, 0) == 0) & (s_y == s_y):
        for first in range(0, stop, N):
            col = first + tl.arange(0, N)
            zero = tl.zeros((N,), tl.float32).to(gradient_ptr.dtype.element_ty)
            tl.store(gradient_ptr + here * S + col, zero, mask=col < n)
        tl.store(value_ptr + here, tl.where(s_y == float("-inf"), float("inf"), 0.0))


@triton.jit
def label_and_score(s_ptr, label_ptr, row, live, n: tl.constexpr, S: tl.constexpr):
    """Return the label and its score for each row, or -1 and NaN if the label is out of range or ``live`` is False."""
    y = tl.load(label_ptr + row, mask=live, other=-1)
    known = (y >= 0) & (y < n)
    s_y = tl.load(s_ptr + row * S + y, mask=known, other=float("nan")).to(tl.float32)
    return tl.where(known, y, -1).to(tl.int32), s_y


@triton.jit
def gradient(v, c, of_margin, count: tl.constexpr):
    # of_margin v (d_{k-2} (1 + v) - 1), where v are balanced odds, and d is the balanced polynomial divided by 1 + v X.
    # c contains of_margin times the last ``count`` balanced coefficients up to degree k - 2.
    out = -v * of_margin
    if count > 0:
        d = tl.zeros_like(v) + c[0]
        for j in tl.static_range(1, count):
            d = c[j] - v * d
        out = v * ((d - of_margin) + d * v)
    return out
