# type: ignore
"""The smooth top-k loss of rows with masses for several classes, and its gradient, in one Triton kernel.

A class with the score s has the odds w = u exp((s - a) / theta) and the factor 1 + w X. The number a is one of the
scores of the row. The number u, the tilt, prevents overflow, and cancels in the results. Let c be the product of the
factors of all classes. As in label.py, the factors of the classes with large odds, the top group, are multiplied one by
one. For all other classes, the tail, only sums of powers of their odds are needed.

The margin of a class is computed from c / (1 + w X), the product without the factor of this class. This is precise if
the sum of w / (1 + w) over the classes of the product is about k - 1/2. Leaving out one of the k largest classes
reduces the sum by about 1, and leaving out any other class changes the sum less. Therefore, there are two values of u:
one for the margins of the k largest classes, and one for the margins of all other classes. If a row is flat (see
label.py), one u serves all its margins.

The gradient with respect to a score has two parts: one for constant c, and one because c depends on the score. The
comment above :func:`mass_rows` has the formulas. A flat row needs four passes: for the largest score, for sums of
powers of the odds, for the losses and the gradient with respect to c, and for the gradient with respect to the scores.

If M is 0, the masses of all classes are given. Otherwise, the masses of M labels are given. If ``EVEN`` is set, every
class has an additional mass. Without additional masses, only the losses of the labels are computed.
"""

import triton
import triton.language as tl

from topk_registry.ops.gpu.arithmetic import LN2, LOG2E, exp2, log2, reciprocal
from topk_registry.ops.gpu.tiles import aligned, classes, clear, others, store, tiles_and_largest
from topk_registry.ops.ksubset.triton.hinge import gap_of, hinge, log64
from topk_registry.ops.ksubset.triton.polynomial import lane_of, probabilities, tail_polynomial, times
from topk_registry.ops.ksubset.triton.rows import (
    add,
    balance,
    balanced,
    columns,
    flat_rows,
    number,
    powers,
    tail_odds,
    tail_powers,
    top_group,
)


# To compute the gradient, c and the odds are scaled such that c_{k-1} = c_k = 1. For a class of the tail with scaled
# odds v, let d = c / (1 + v X) and e = d / (1 + v X). Let ``chain`` be the derivative of the loss of this class with
# respect to c_{k-1}, divided by theta. For constant c, the gradient with respect to the score of this class is
#     chain e_{k-1} = chain (d_{k-1} - v e_{k-2}).
# Let L be the sum of the losses of all classes. The gradient with respect to c has the coefficients
#     W_0 = (dL/dc_k) / theta = -sum chain d_{k-1},   W_r = (dL/dc_{k-r}) / theta = sum chain (-v)^(r-1), r = 1..k-1.
# Let W = sum_r W_r X^r. If the row is flat, the dependence of c on the score adds v times the coefficient of X^(k-1) in
# c W / (1 + v X) to the gradient. In any other row, the losses of the top group add further terms.
@triton.jit
def mass_rows(
    s_ptr, q_ptr, label_ptr, share_ptr, even_ptr, alpha, value_ptr, gradient_ptr,
    B, depth, theta, theta_low, inverse, tau, inverse_tau, inverse_tau_low,
    M: tl.constexpr, EVEN: tl.constexpr, ALPHA: tl.constexpr, n: tl.constexpr, S: tl.constexpr, SQ: tl.constexpr,
    k: tl.constexpr, TP: tl.constexpr, R: tl.constexpr, N: tl.constexpr, TILES: tl.constexpr,
    VECTOR: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """Write the loss sum_c q_c tau softplus((alpha_c - m_c / k) / tau) of each row, and its gradient.

    The mass q_c is the weight of class c in the target of the row. If a row has no mass, the loss and the gradient are
    0. The margin m_c is the score of class c minus the k-th largest score of the other classes, smoothed with
    temperature theta.

    Args:
        s_ptr: scores, B rows of n numbers with the distance S between rows.
        q_ptr: masses of all classes, B rows with the distance SQ. This argument is read if M is 0.
        label_ptr, share_ptr: labels and their masses [B, M].
        even_ptr: additional mass of every class [B]. This argument is read if ``EVEN`` is set.
        alpha: required margin, see :func:`hinge.gap_of`.
        value_ptr: output, losses [B].
        gradient_ptr: output, gradient in the memory layout of the scores. All other arguments are as in ``label_rows``.
    """
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    there = row < B
    y = tl.full((R,), -1, tl.int32)  # no class is left out
    start, shift = aligned(row, S, VECTOR)
    scores_ptr = s_ptr + start
    masses_ptr = q_ptr + (start if SQ == S else row * SQ - shift)
    LABELS_ONLY: tl.constexpr = M > 0 and not EVEN  # only labels have mass
    steep = inverse * LOG2E
    known, has_mass, labels, shares = few_labels(label_ptr, share_ptr, even_ptr, row, there, M, EVEN, n)
    live = there & has_mass

    # The row is read from memory in each pass. In registers, a row would take 90 registers more.
    _tiles, a = tiles_and_largest(scores_ptr, live, y, shift, n, R, N, TILES, False, SHIFTED)

    sums = powers(tl.zeros((R, N), tl.float32), k)
    for tile in tl.range(TILES, loop_unroll_factor=2):
        s = others(scores_ptr, live, y, shift, tile, n, R, N, SHIFTED)
        sums = add(sums, powers(exp2((s - a[:, None]) * steep), k), k)
    flat, base, c = flat_rows(sums, live & known, k)
    ratio = c[k - 1] / c[k]
    c = balanced(c, 1.0 / ratio, 1.0, k)
    tilt = base * ratio

    if tl.max(flat.to(tl.int32), 0) > 0:
        of_row = columns(c, k - 1)
        reference = a[:, None]
        log_tilt = tl.log2(tilt)[:, None]
        if LABELS_ONLY:
            selected = ()
            for _ in tl.static_range(M):
                selected = selected + (flat,)
            costs, W, odds, _, steps = few_hinges(
                s_ptr + row * S, alpha, labels, shares, selected, a, a, steep, tl.log2(tilt),
                tl.log2(tilt), inverse_tau, c, tau, M, ALPHA, k,
            )  # fmt: skip
        else:
            totals = powers(tl.zeros((R, N), tl.float32), k + 1)
            for tile in tl.range(TILES, loop_unroll_factor=2):
                u = others(scores_ptr, live, y, shift, tile, n, R, N, SHIFTED) - reference
                v, cost, chain, d, e = flat_hinges(
                    u, masses_ptr, alpha, labels, shares, live, shift, tile, steep, log_tilt,
                    inverse_tau, of_row, tau, M, ALPHA, n, k, R, N, SHIFTED,
                )  # fmt: skip
                totals = add(totals, moments(cost, chain, d, v, k), k + 1)
        if LABELS_ONLY:
            tl.store(value_ptr + row, costs, mask=flat)
        else:
            tl.store(value_ptr + row, tl.sum(totals[0], 1), mask=flat)
            W = ()
            for j in tl.static_range(k):
                W = W + (tl.sum(totals[j + 1], 1),)
        of_all = product(with_last(c, tilt, k - 1), W, k)
        H = columns(of_all, k)
        for tile in tl.range(TILES, loop_unroll_factor=2):
            u = others(scores_ptr, live, y, shift, tile, n, R, N, SHIFTED) - reference
            if LABELS_ONLY:
                v = exp2(u * steep + log_tilt)
                out = v * quotient(v, H, k)
            else:
                v, _, chain, d, e = flat_hinges(
                    u, masses_ptr, alpha, labels, shares, live, shift, tile, steep,
                    log_tilt, inverse_tau, of_row, tau, M, ALPHA, n, k, R, N, SHIFTED,
                )  # fmt: skip
                out = chain * (d - v * e) + v * quotient(v, H, k)
            store(gradient_ptr + start, out, flat, shift, tile, n, R, N, SHIFTED)
        if LABELS_ONLY:
            tl.debug_barrier()  # wait until other threads have written the entries of the labels
            for m in tl.static_range(M):
                g_label = at_label(steps, labels, m, M) + odds[m] * quotient(odds[m], of_all, k)
                tl.store(gradient_ptr + row * S + labels[m + 1], g_label, mask=flat)

    for r in range(R):
        here = tl.program_id(0).to(tl.int64) * R + r
        if tl.sum(tl.where((row == here) & live & (flat == 0), 1, 0), 0) > 0:
            search_masses(
                s_ptr, q_ptr, label_ptr, share_ptr, even_ptr, alpha, value_ptr, gradient_ptr,
                here, depth, theta, theta_low, inverse, tau, inverse_tau, inverse_tau_low,
                M, EVEN, ALPHA, n, S, SQ, k, TP, N, TILES, VECTOR, SHIFTED,
            )  # fmt: skip
    empty = there & (live == 0)
    if M > 0:  # noqa: SIM102 (M is a constant, the next condition is not)
        if tl.max(empty.to(tl.int32), 0) > 0:
            clear(value_ptr, gradient_ptr + start, row, shift, empty, n, R, N, TILES, SHIFTED)


@triton.jit
def search_masses(
    s_ptr, q_ptr, label_ptr, share_ptr, even_ptr, alpha, value_ptr, gradient_ptr,
    here, depth, theta, theta_low, inverse, tau, inverse_tau, inverse_tau_low,
    M: tl.constexpr, EVEN: tl.constexpr, ALPHA: tl.constexpr, n: tl.constexpr, S: tl.constexpr, SQ: tl.constexpr,
    k: tl.constexpr, TP: tl.constexpr, N: tl.constexpr, TILES: tl.constexpr,
    VECTOR: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """Compute the loss and the gradient of row ``here``.

    ``mass_rows`` calls this function for rows with a softmax probability above 1 / (2 k), and for invalid rows. A row
    is invalid if it contains NaN, if a label is out of range, or if at most k scores are above -inf.
    All other arguments are as in ``mass_rows``.
    """
    LABELS_ONLY: tl.constexpr = M > 0 and not EVEN
    row = here + tl.arange(0, 1)
    live = row >= 0
    y = tl.full((1,), -1, tl.int32)
    start, shift = aligned(row, S, VECTOR)
    scores_ptr = s_ptr + start
    masses_ptr = q_ptr + (start if SQ == S else row * SQ - shift)
    tiles = TILES + depth - k
    known, _counted, labels, shares = few_labels(label_ptr, share_ptr, even_ptr, row, live, M, EVEN, n)
    known = tl.sum(known.to(tl.int32), 0) > 0
    top, where, size, after, u_after, v, i, broken = top_group(
        scores_ptr, live, y, shift, known, depth + 1, inverse, k + 1, TP, 2 * TP, n, N, TILES, SHIFTED
    )
    # Lanes i and TP + i are for class i of the top group. Each holds the product of all factors except that of class i.
    # The last lane of each half holds the product of all factors. The lanes from TP on use the tilt for the k largest
    # classes, and the first TP lanes use the tilt for all other classes.
    lane = tl.arange(0, 2 * TP)
    member = lane % TP
    in_group = member < size
    kth = lane_of(top, lane, depth - 1)
    gap = tl.exp((after - kth) * inverse)
    P_after = tail_powers(scores_ptr, live, y, shift, after, u_after, v, i, inverse, tiles, k, n, N, SHIFTED)
    x = tl.where(in_group & (lane < TP), (top - kth) * inverse, float("-inf"))
    u_kth = balance(x, P_after[0] / u_after * gap, lane, depth, k)
    to_kth = gap * (u_kth / u_after)
    P = ()
    factor_j = to_kth
    for j in tl.static_range(k):
        P = P + (P_after[j] * factor_j,)
        factor_j = factor_j * to_kth
    b = tail_polynomial(P, k)
    b_after = tail_polynomial(P_after, k)

    first = lane >= TP  # the tilt for the k largest classes
    active = in_group & (first == (member < depth))
    reference = tl.where(first, after, kth)
    tilt = tl.where(first, u_after, u_kth)
    e = per_lane(first, b_after, b, k + 1)
    for f in range(size):
        q, p = probabilities((lane_of(top, lane, f) - reference) * inverse, 1.0 / tilt)
        e = times(e, tl.where(member == f, 1.0, q), tl.where(member == f, 0.0, p), k)
    c = ()
    for j in tl.static_range(k + 1):
        c = c + (lane_of(e[j], lane, TP - 1),)
    ratio = c[k - 1] / c[k]

    # losses of the top group, in double precision as in store_hinge
    log = log64((e[k - 1] / e[k]).to(tl.float64) * tilt.to(tl.float64))
    margin = (top.to(tl.float64) - reference.to(tl.float64)) + (log * theta + log * theta_low)
    q = masses_at(q_ptr + here * SQ, labels, shares, where, active, M)
    required = gap_of(alpha, where, active, ALPHA)
    cost, slope = hinge(margin, required, tau, inverse_tau, inverse_tau_low, k)
    has_mass = active & (q != 0.0)
    value = tl.sum(tl.where(has_mass, q * cost, 0.0), 0)
    g = tl.where(has_mass, q * slope.to(tl.float32), 0.0)
    to_below = tl.where(active, g / e[k - 1], 0.0)
    to_last = tl.where(active, -g / e[k], 0.0)

    of_row = balanced(c, 1.0 / ratio, 1.0, k)
    to_first = gap * u_kth  # converts odds exp((s - after) / theta) into odds at the tilt for k
    log_tilt = tl.log2(u_kth * ratio)
    of_tail = ()
    if LABELS_ONLY:
        selected = in_tail(s_ptr + row * S, labels, v, i, M, n)
        costs, cotangents, _, odds, steps = few_hinges(
            s_ptr + row * S, alpha, labels, shares, selected, kth, after, inverse * LOG2E,
            tl.log2(to_first * ratio), log_tilt, inverse_tau, of_row, tau, M, ALPHA, k,
        )  # fmt: skip
        value += tl.sum(costs, 0)
        for j in tl.static_range(k):
            of_tail = of_tail + (tl.sum(cotangents[j], 0),)
    else:
        sums = powers(tl.zeros((1, N), tl.float32), k + 1)
        for tile in range(tiles):
            distance, w, mass, required, gain = tail_tile(
                scores_ptr, masses_ptr, alpha, labels, shares, live, y, shift, tile,
                kth, after, v, i, inverse, inverse_tau, M, ALPHA, n, N, SHIFTED,
            )  # fmt: skip
            balanced_w = w * (to_first * ratio)
            costs, chain, d, _ = tail_hinges(
                distance, balanced_w, mass, required, gain, of_row, tau, log_tilt, k
            )  # fmt: skip
            sums = add(sums, moments(costs, chain, d, balanced_w, k), k + 1)
        value += number(sums[0])
        for j in tl.static_range(k):
            of_tail = of_tail + (number(sums[j + 1]),)
    W = ()
    back = 1.0 / c[k]
    for j in tl.static_range(k):
        W = W + (of_tail[j] * back,)
        back = back / ratio
    tl.store(value_ptr + here, tl.where(broken, float("nan"), value))

    H = product(b, W, k)
    F = ()
    for j in tl.static_range(k):
        F = F + (tl.where(first, 0.0, H[j]),)
    e = per_lane(first, b_after, b, k)
    for f in range(size):
        q, p = probabilities((lane_of(top, lane, f) - reference) * inverse, 1.0 / tilt)
        here_too = (first == (f < depth)) & (member != f)
        below = tl.where(here_too, tl.sum(tl.where(member == f, to_below, 0.0), 0), 0.0)
        last = tl.where(here_too, tl.sum(tl.where(member == f, to_last, 0.0), 0), 0.0)
        q = tl.where(member == f, 1.0, q)
        p = tl.where(member == f, 0.0, p)
        F = with_cotangents(F, e, q, p, below, last, k - 1)
        e = times(e, q, p, k - 1)
    H = ()
    H_after = ()
    for j in tl.static_range(k):
        H = H + (lane_of(F[j], lane, TP - 1),)
        H_after = H_after + (lane_of(F[j], lane, 2 * TP - 1),)

    nan_if_invalid = tl.where(broken, float("nan"), 0.0)
    for tile in range(tiles):
        if LABELS_ONLY:
            w = tail_odds(scores_ptr, live, y, shift, tile, after, v, i, inverse, n, N, SHIFTED)
            out = of_both(w, to_first, u_after, H, H_after, k)
        else:
            distance, w, mass, required, gain = tail_tile(
                scores_ptr, masses_ptr, alpha, labels, shares, live, y, shift, tile,
                kth, after, v, i, inverse, inverse_tau, M, ALPHA, n, N, SHIFTED,
            )  # fmt: skip
            balanced_w = w * (to_first * ratio)
            _, chain, d, e_below = tail_hinges(
                distance, balanced_w, mass, required, gain, of_row, tau, log_tilt, k
            )  # fmt: skip
            out = chain * (d - balanced_w * e_below) + of_both(w, to_first, u_after, H, H_after, k)
        store(gradient_ptr + start, out + nan_if_invalid, live, shift, tile, n, 1, N, SHIFTED)
    _, p = probabilities((top - reference) * inverse, 1.0 / tilt)
    entry = tl.where(in_group, p * F[k - 1] + g, 0.0)
    entry = tl.sum(tl.reshape(entry, (2, TP)), 0)
    where = tl.max(tl.reshape(where, (2, TP)), 0)
    lane = tl.arange(0, TP)
    tl.debug_barrier()  # wait until other threads have written these entries
    tl.store(gradient_ptr + here * S + where, entry + nan_if_invalid, mask=(lane < size) & (where < n))
    if LABELS_ONLY:
        for m in tl.static_range(M):
            g_label = at_label(steps, labels, m, M) + of_both(odds[m], to_first, u_after, H, H_after, k)
            tl.store(gradient_ptr + row * S + labels[m + 1], g_label + nan_if_invalid, mask=selected[m])
    if broken & known:
        write_invalid_row(
            scores_ptr, masses_ptr, labels, shares, value_ptr, gradient_ptr + start, row, live, y, shift, after, tiles,
            M, n, N, TILES, SHIFTED,
        )  # fmt: skip


@triton.jit
def write_invalid_row(
    scores_ptr, masses_ptr, labels, shares, value_ptr, gradient_ptr, row, live, y, shift, after, tiles,
    M: tl.constexpr, n: tl.constexpr, N: tl.constexpr, TILES: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """Correct the loss and the gradient of an invalid row, for which the caller wrote NaN, in two cases.

    If the row has no mass, the loss and the gradient become 0. If the row has at most k scores above -inf and no NaN,
    the gradient becomes 0. In this second case, the loss becomes inf if a class with score -inf has mass, else 0.
    ``after`` is the (k + 1)-th largest score.
    """
    bad = tl.zeros((1, N), tl.int32)
    some = tl.zeros((1, N), tl.int32)
    missed = tl.zeros((1, N), tl.int32)
    for tile in range(tiles):
        s = others(scores_ptr, live, y, shift, tile, n, 1, N, SHIFTED)
        q = masses(masses_ptr, labels, shares, live, shift, tile, M, n, 1, N, SHIFTED)
        bad = bad | (s != s).to(tl.int32)
        some = some | (q != 0.0).to(tl.int32)
        missed = missed | ((q != 0.0) & (s == float("-inf"))).to(tl.int32)
    too_few = (after == float("-inf")) & (tl.max(tl.max(bad, 1), 0) == 0)
    if (tl.max(tl.max(some, 1), 0) == 0) | too_few:
        tl.debug_barrier()
        clear(value_ptr, gradient_ptr, row, shift, live, n, 1, N, TILES, SHIFTED)
        tl.debug_barrier()
        tl.store(value_ptr + row, tl.where(tl.max(missed, 1) > 0, float("inf"), 0.0))


@triton.jit
def in_tail(s_ptr, labels, v, i, M: tl.constexpr, n: tl.constexpr):
    # which labels are in range and come after class i with score v, in descending order of scores
    out = ()
    for m in tl.static_range(M):
        known = (labels[m + 1] >= 0) & (labels[m + 1] < n)
        s = tl.load(s_ptr + labels[m + 1], mask=known, other=float("inf")).to(tl.float32)
        out = out + (known & ((s < v) | ((s == v) & (labels[m + 1] > i))),)
    return out


@triton.jit
def few_hinges(
    s_ptr, alpha, labels, shares, selected, kth, after, steep, log_scale, log_tilt,
    inverse_tau, c, tau, M: tl.constexpr, ALPHA: tl.constexpr, k: tl.constexpr,
):  # fmt: skip
    # The losses of labels of the tail. ``selected`` contains a mask per label: the rows in which the label is in the
    # tail. The results are: ``costs``, the sum of the losses of a row; W, the gradient of ``costs`` with respect to
    # c_k, ..., c_1, divided by theta; and for each label the balanced odds, the odds exp((s - after) / theta), and the
    # gradient with respect to the score for constant c.
    costs = tl.zeros_like(shares[0])
    W = powers(costs, k)
    balanced_odds = ()
    odds = ()
    steps = ()
    for m in tl.static_range(M):
        y = labels[m + 1]
        s = tl.load(s_ptr + y, mask=selected[m], other=0.0).to(tl.float32)
        q = tl.where(selected[m], shares[m], 0.0)
        required = gap_of(alpha, y, selected[m], ALPHA)
        u = (s - after) * steep
        v = exp2(u + log_scale)
        cost, chain, d, e = tail_hinges(
            s - kth, v, q, required, tl.exp(-required * inverse_tau), c, tau, log_tilt, k
        )  # fmt: skip
        terms = moments(cost, chain, d, v, k)
        costs += terms[0]
        W = add(W, terms[1:], k)
        balanced_odds = balanced_odds + (v,)
        odds = odds + (exp2(u),)
        steps = steps + (chain * (d - v * e),)
    return costs, W, balanced_odds, odds, steps


@triton.jit
def at_label(steps, labels, m: tl.constexpr, M: tl.constexpr):
    # the sum of ``steps`` over all labels that are the same class as label m
    out = tl.zeros_like(steps[m])
    for other in tl.static_range(M):
        out += tl.where(labels[other + 1] == labels[m + 1], steps[other], 0.0)
    return out


@triton.jit
def of_both(w, to_first, to_after, H, H_after, k: tl.constexpr):
    # v times the coefficient k - 1 of H / (1 + v X), for the odds v at both tilts
    first = w * to_first
    last = w * to_after
    return first * quotient(first, H, k) + last * quotient(last, H_after, k)


@triton.jit
def gaps(
    alpha, inverse_tau, shift, tile,
    ALPHA: tl.constexpr, n: tl.constexpr, N: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    # the required margins alpha of a tile's classes, or one number for all classes, and exp(-alpha / tau)
    col, there = classes(shift, tile, n, N, SHIFTED)
    required = gap_of(alpha, col, there, ALPHA)
    return required, tl.exp(-required * inverse_tau)


@triton.jit
def flat_hinges(
    u, q_ptr, alpha, labels, shares, live, shift, tile, steep, log_tilt,
    inverse_tau, c, tau, M: tl.constexpr, ALPHA: tl.constexpr,
    n: tl.constexpr, k: tl.constexpr, R: tl.constexpr, N: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    # balanced odds v, and results of tail_hinges, for a tile of flat rows; u are scores minus the largest score
    q = masses(q_ptr, labels, shares, live, shift, tile, M, n, R, N, SHIFTED)
    required, gain = gaps(alpha, inverse_tau, shift, tile, ALPHA, n, N, SHIFTED)
    v = exp2(u * steep + log_tilt)
    cost, chain, d, e = tail_hinges(u, v, q, required, gain, c, tau, log_tilt, k)
    return v, cost, chain, d, e


@triton.jit
def tail_tile(
    s_ptr, q_ptr, alpha, labels, shares, live, y, shift, tile,
    kth, after, v, i, inverse, inverse_tau,
    M: tl.constexpr, ALPHA: tl.constexpr, n: tl.constexpr, N: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    # inputs of tail_hinges for a tile with the scores s: s - kth, the odds exp((s - after) inverse), the masses, the
    # required margins alpha, and exp(-alpha / tau). ``kth`` and ``after`` are the k-th and the (k + 1)-th largest score
    # of the row. The first three are 0 for the top group, whose last class is class i with the score v.
    s = others(s_ptr, live, y, shift, tile, n, 1, N, SHIFTED)
    col = tile * N + tl.arange(0, N)[None, :] - shift[:, None]
    in_group = (s > v) | ((s == v) & (col <= i))
    w = tl.where(in_group, 0.0, tl.exp((s - after) * inverse))
    q = masses(q_ptr, labels, shares, live, shift, tile, M, n, 1, N, SHIFTED)
    required, gain = gaps(alpha, inverse_tau, shift, tile, ALPHA, n, N, SHIFTED)
    return tl.where(in_group, 0.0, s - kth), w, tl.where(in_group, 0.0, q), required, gain


@triton.jit
def tail_hinges(u, v, q, required, gain, c, tau, log_tilt, k: tl.constexpr):
    """Compute the losses of classes of the tail, and their derivatives. Return (q L, chain, d_{k-1}, e_{k-2}).

    Let c be the product of 1 + v X over all classes, where v are the odds of a class. For a class with the odds v, d_j
    and e_j are the coefficients of X^j in d = c / (1 + v X) and e = d / (1 + v X). A class with the mass q has the loss
    q L with L = tau log(1 + exp(required / tau) d_k / (v d_{k-1})). ``chain`` is the derivative of q L with respect to
    c_{k-1}, divided by theta. The gradient follows from the last three results.

    Args:
        u: score minus a reference score.
        v, log_tilt: odds of the class, v = exp(u / theta) 2^log_tilt, where theta = k tau is the temperature.
        required, gain: required margin and exp(-required / tau).
        c: coefficients c_0..c_{k-2}. The odds and c are scaled such that c_{k-1} = c_k = 1.
    """
    d = tl.zeros_like(v) + 1.0
    e = tl.zeros_like(v)
    if k > 1:
        d = tl.zeros_like(v) + c[0]
        for j in tl.static_range(1, k - 1):
            e = d - v * e
            d = c[j] - v * d
        e = d - v * e
        d = 1.0 - v * d
    x = 1.0 - v * d * (1.0 - gain)
    r = reciprocal(x * d)
    cost = (required - u * (1.0 / k)) + (tau * LN2) * (log2(x * x * r) - log_tilt)
    return tl.where(q != 0.0, q * cost, 0.0), -(q * (1.0 / k)) * r, d, e


@triton.jit
def moments(cost, chain, d, v, count: tl.constexpr):
    # the cost, and the terms of the class in W_0, ..., W_{count-1}
    out = (cost, -chain * d)
    term = chain
    for _ in tl.static_range(1, count):
        out = out + (term,)
        term = -v * term
    return out


@triton.jit
def product(a, b, k: tl.constexpr):
    out = ()
    for m in tl.static_range(k):
        total = a[m] * b[0]
        for j in tl.static_range(1, m + 1):
            total += a[m - j] * b[j]
        out = out + (total,)
    return out


@triton.jit
def quotient(v, H, count: tl.constexpr):
    """Return the coefficient of degree count - 1 of H / (1 + v X), where H has the coefficients 0..count-1."""
    h = tl.zeros_like(v) + H[0]
    for j in tl.static_range(1, count):
        h = H[j] - v * h
    return h


@triton.jit
def with_last(c, like, count: tl.constexpr):
    # the first ``count`` coefficients of c, followed by a 1 in the shape of ``like``
    out = ()
    for j in tl.static_range(count):
        out = out + (c[j],)
    return out + (tl.zeros_like(like) + 1.0,)


@triton.jit
def per_lane(chosen, one, other, count: tl.constexpr):
    out = ()
    for j in tl.static_range(count):
        out = out + (tl.where(chosen, one[j], other[j]),)
    return out


@triton.jit
def with_cotangents(F, e, q, p, alpha, beta, degree: tl.constexpr):
    # the coefficients 0..degree of (q + p X) F + (alpha X + beta) e
    out = (q * F[0] + beta * e[0],)
    for j in tl.static_range(1, degree + 1):
        out = out + (q * F[j] + p * F[j - 1] + (beta * e[j] + alpha * e[j - 1]),)
    return out


@triton.jit
def few_labels(label_ptr, share_ptr, even_ptr, row, there, M: tl.constexpr, EVEN: tl.constexpr, n: tl.constexpr):
    """Load the labels and masses of each row for which ``there`` is True.

    Returns:
        (known, has_mass, labels, shares). ``known`` tells whether all labels of a row are in range. ``has_mass`` tells
        whether the row has mass. Rows with a label out of range count as rows with mass, because their loss is NaN
        instead of 0. ``labels`` is a tuple: -1 (unused), then the M labels. ``shares`` is a tuple: the masses of the M
        labels, then the additional mass of every class.
    """
    known = there
    labels = (row.to(tl.int32) * 0 - 1,)  # -1: no class
    even = tl.zeros_like(labels[0].to(tl.float32))
    shares = ()
    if M == 0:
        has_mass = there
    else:
        has_mass = there & (there == 0)
        for m in tl.static_range(M):
            label = tl.load(label_ptr + row * M + m, mask=there, other=0)
            known = known & (label >= 0) & (label < n)
            share = tl.load(share_ptr + row * M + m, mask=there, other=0.0).to(tl.float32)
            has_mass = has_mass | (there & (share != 0.0))
            labels = labels + (label.to(tl.int32),)
            shares = shares + (share,)
        if EVEN:
            even = tl.load(even_ptr + row, mask=there, other=0.0).to(tl.float32)
        has_mass = has_mass | (there & ((even != 0.0) | (known == 0)))
    return known, has_mass, labels, shares + (even,)


@triton.jit
def masses(
    q_ptr, labels, shares, live, shift, tile,
    M: tl.constexpr, n: tl.constexpr, R: tl.constexpr, N: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """Return the masses of the classes of a tile [R, N]. Entries outside of the row are 0."""
    col, there = classes(shift, tile, n, N, SHIFTED)
    inside = live[:, None] & there
    if M == 0:
        q = tl.load(q_ptr[:, None] + (tile * N + tl.arange(0, N)[None, :]), mask=inside, other=0.0).to(tl.float32)
    elif R > 1:
        q = masked_masses(col, inside, labels, shares, M)
    else:  # most tiles need no comparisons: they are inside of the row and contain no label
        first = tile * N - tl.sum(shift, 0)
        plain = (first >= 0) & (first + N <= n)
        for m in tl.static_range(M):
            label = tl.sum(labels[m + 1], 0)
            plain = plain & ((label < first) | (label >= first + N))
        if plain:
            q = tl.zeros((R, N), tl.float32) + shares[M][:, None]
        else:
            q = masked_masses(col, inside, labels, shares, M)
    return q


@triton.jit
def masked_masses(col, inside, labels, shares, M: tl.constexpr):
    q = tl.where(inside, shares[M][:, None], 0.0)
    for m in tl.static_range(M):
        q += tl.where(col == labels[m + 1][:, None], shares[m][:, None], 0.0)
    return q


@triton.jit
def masses_at(q_ptr, labels, shares, where, selected, M: tl.constexpr):
    if M == 0:
        q = tl.load(q_ptr + where, mask=selected, other=0.0).to(tl.float32)
    else:
        q = tl.where(selected, tl.sum(shares[M], 0), 0.0)
        for m in tl.static_range(M):
            q += tl.where(where == tl.sum(labels[m + 1], 0), tl.sum(shares[m], 0), 0.0)
    return q
