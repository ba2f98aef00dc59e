# type: ignore
"""Targets in kernels: the masses of the classes of a tile, of a distribution in memory or of a few labels a row."""

import triton
import triton.language as tl

from topk_registry.ops.gpu.tiles import classes, store


@triton.jit
def few_labels(
    label_ptr, share_ptr, even_ptr, row, live, share, even, ignore_index,
    M: tl.constexpr, MIXED: tl.constexpr, EVEN: tl.constexpr, n: tl.constexpr,
):  # fmt: skip
    """Return ``known`` (all labels are classes), ``counted`` (the row counts), the labels after a leading -1, and their
    shares, with the share of every class last.

    With ``MIXED`` the shares are in memory, ``share`` multiplies them, and a row without any does not count. Without,
    the one label has ``share`` and every class ``even``, and a row does not count if its label is ``ignore_index``.
    """
    known = live
    labels = (row.to(tl.int32) * 0 - 1,)  # no class
    spread = tl.zeros_like(labels[0].to(tl.float32))
    shares = ()
    if MIXED:
        counted = live & (live == 0)
        for m in tl.static_range(M):
            label = tl.load(label_ptr + row * M + m, mask=live, other=0)
            known = known & (label >= 0) & (label < n)
            own = tl.load(share_ptr + row * M + m, mask=live, other=0.0).to(tl.float32) * share
            counted = counted | (live & (own != 0.0))
            labels = labels + (label.to(tl.int32),)
            shares = shares + (own,)
        if EVEN:
            spread = tl.load(even_ptr + row, mask=live, other=0.0).to(tl.float32) * (share / n)
        counted = counted | (live & ((spread != 0.0) | (known == 0)))
    elif M == 1:
        label = tl.load(label_ptr + row, mask=live, other=0)
        counted = live & (label != ignore_index)
        known = live & ((counted == 0) | ((label >= 0) & (label < n)))
        labels = labels + (label.to(tl.int32),)
        shares = (tl.where(counted, share, 0.0),)
        spread = tl.where(counted, even, 0.0)
    else:
        counted = live
    return known, counted, labels, shares + (spread,)


@triton.jit
def masses(
    q_ptr, weight_ptr, labels, shares, factor, live, shift, tile,
    DENSE: tl.constexpr, M: tl.constexpr, WEIGHTED: tl.constexpr,
    n: tl.constexpr, R: tl.constexpr, N: tl.constexpr, SHIFTED: tl.constexpr, EVEN: tl.constexpr = False,
):  # fmt: skip
    """The masses of a tile's classes [R, N], with weight and factor; 0 for what is not in the row.

    ``EVEN`` says that a distribution in memory has a mass beside it that all classes share.
    """
    col, there = classes(shift, tile, n, N, SHIFTED)
    inside = live[:, None] & there
    if DENSE:
        q = tl.load(q_ptr[:, None] + (tile * N + tl.arange(0, N)[None, :]), mask=inside, other=0.0)
        q = q.to(tl.float32) * factor
        if EVEN:
            q = tl.where(inside, q + shares[M][:, None], 0.0)
    elif R > 1:
        q = masked_masses(col, inside, labels, shares, M)
    else:  # most tiles are within the row and without a label: they need no comparisons
        first = tile * N - tl.sum(shift, 0)
        plain = (first >= 0) & (first + N <= n)
        for m in tl.static_range(M):
            label = tl.sum(labels[m + 1], 0)
            plain = plain & ((label < first) | (label >= first + N))
        if plain:
            q = tl.zeros((R, N), tl.float32) + shares[M][:, None]
        else:
            q = masked_masses(col, inside, labels, shares, M)
    if WEIGHTED:
        q = q * tl.load(weight_ptr + col, mask=there, other=0.0).to(tl.float32)
    return q


@triton.jit
def masked_masses(col, inside, labels, shares, M: tl.constexpr):
    q = tl.where(inside, shares[M][:, None], 0.0)
    for m in tl.static_range(M):
        q += tl.where(col == labels[m + 1][:, None], shares[m][:, None], 0.0)
    return q


@triton.jit
def masses_at(
    q_ptr, weight_ptr, labels, shares, factor, where, wanted,
    DENSE: tl.constexpr, M: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """The masses of the classes ``where``, of a row that is alone."""
    if DENSE:
        q = tl.load(q_ptr + where, mask=wanted, other=0.0).to(tl.float32) * factor
    else:
        q = tl.where(wanted, tl.sum(shares[M], 0), 0.0)
        for m in tl.static_range(M):
            q += tl.where(where == tl.sum(labels[m + 1], 0), tl.sum(shares[m], 0), 0.0)
    if WEIGHTED:
        q = q * tl.load(weight_ptr + where, mask=wanted, other=0.0).to(tl.float32)
    return q


@triton.jit
def targets(
    target_ptr, share_ptr, uniform_ptr, B, share, even, ignore_index,
    M: tl.constexpr, MIXED: tl.constexpr, UNIFORM: tl.constexpr, n: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """A program's rows, which of them there are and which count, and labels and shares as :func:`masses` takes them.

    M is the number of labels a row, 0 where a distribution is in memory. ``MIXED`` says that labels have shares, and
    ``UNIFORM`` that all classes share a mass; a row without mass does not count. The label of a row without one is -1.
    Shares of a label that is no class are NaN, and make its row NaN.
    """
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    live = row < B
    labels = (row.to(tl.int32) * 0 - 1,)
    if M == 0:
        return row, live, live, labels, (tl.zeros((R,), tl.float32) + even,)
    else:
        known, counted, known_labels, parts = few_labels(
            target_ptr, share_ptr, uniform_ptr, row, live, share, even, ignore_index, M, MIXED, UNIFORM, n
        )
        spoilt = tl.where(live & (known == 0), float("nan"), 0.0)
        shares = ()
        for m in tl.static_range(M):
            label = known_labels[m + 1]
            labels = labels + (tl.where(counted & (label >= 0) & (label < n), label, -1),)
            shares = shares + (parts[m] + spoilt,)
        return row, live, counted, labels, shares + (parts[M] + spoilt,)


@triton.jit
def whole_masses(
    q_ptr, weight_ptr, labels, shares, share, counted, shift,
    M: tl.constexpr, EVEN: tl.constexpr, WEIGHTED: tl.constexpr,
    n: tl.constexpr, R: tl.constexpr, N: tl.constexpr, TILES: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """The sum of each row's masses."""
    if M == 0 or (EVEN and WEIGHTED):
        sums = tl.zeros((R, N), tl.float32)
        for tile in tl.range(TILES, loop_unroll_factor=2):
            sums += masses(
                q_ptr, weight_ptr, labels, shares, share, counted, shift, tile,
                M == 0, M, WEIGHTED, n, R, N, SHIFTED, EVEN,
            )  # fmt: skip
        return tl.sum(sums, 1)
    else:
        whole = shares[M] * n
        for m in tl.static_range(M):
            own = shares[m]
            if WEIGHTED:
                own = own * tl.load(weight_ptr + labels[m + 1], mask=labels[m + 1] >= 0, other=1.0).to(tl.float32)
            whole += own
        return whole


@triton.jit
def clear(
    value_ptr, gradient_ptr, row, shift, live, GRADIENT: tl.constexpr,
    n: tl.constexpr, R: tl.constexpr, N: tl.constexpr, TILES: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """A row that costs nothing."""
    tl.store(value_ptr + row, tl.zeros((R,), tl.float32), mask=live)
    if GRADIENT:
        for tile in range(TILES):
            store(gradient_ptr, tl.zeros((R, N), tl.float32), live, shift, tile, n, R, N, SHIFTED)
