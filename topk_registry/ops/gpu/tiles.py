# type: ignore
"""Tiles of rows for kernels: positions, loads and stores.

A program, a group of GPU threads, works on R rows. A row of n numbers is divided into TILES tiles of N numbers. If
CACHED is True, all tiles of a row stay in registers. Otherwise, each pass over the row reads the tiles again. In
memory, a row begins S numbers after the previous row. A tile begins at a multiple of VECTOR numbers, so that loads and
stores move whole vectors. If S is not a multiple of VECTOR, SHIFTED is True, and the first tile can begin before the
row. ``shift`` is the number of entries of the first tile that precede the row.
"""

import triton
import triton.language as tl


@triton.jit
def aligned(row, S: tl.constexpr, VECTOR: tl.constexpr):
    """Return (start, shift): where the first tile of a row begins, and how many numbers later the row begins.

    A row begins at row * S. Tiles begin at multiples of VECTOR, so ``start`` is row * S rounded down to a multiple.
    """
    if S % VECTOR == 0:
        return row * S, (row * 0).to(tl.int32)
    else:
        start = row * S // VECTOR * VECTOR
        return start, (row * S - start).to(tl.int32)


@triton.jit
def others(s_ptr, live, y, shift, tile, n: tl.constexpr, R: tl.constexpr, N: tl.constexpr, SHIFTED: tl.constexpr):
    """Return the scores of a tile [R, N] of R rows. The label ``y`` and entries outside of the row become -inf.

    ``tile`` is the index of the tile in its row. ``shift`` [R] is the number of entries of tile 0 that precede the row.
    If R > 1, a row with False in ``live`` [R] is not read, and its scores become -inf. If R is 1, the row may be read
    even if ``live`` is False.
    """
    place = tile * N + tl.arange(0, N)[None, :]
    pointers = s_ptr[:, None] + place
    if R > 1:
        s = masked(pointers, place, live, y, shift, n, SHIFTED)
    else:  # most tiles are inside of the row and do not contain the label, so these tiles need no comparisons
        first = tile * N - tl.sum(shift, 0)
        label = tl.sum(y, 0)
        if (first >= 0) & (first + N <= n) & ((label < first) | (label >= first + N)):
            s = tl.load(pointers).to(tl.float32)
        else:
            s = masked(pointers, place, live, y, shift, n, SHIFTED)
    return s


@triton.jit
def masked(pointers, place, live, y, shift, n: tl.constexpr, SHIFTED: tl.constexpr):
    col = place - shift[:, None]
    if not SHIFTED:
        col = place
        s = tl.load(pointers, mask=live[:, None] & (col < n), other=float("-inf"))
    else:
        s = tl.load(pointers, mask=live[:, None] & (col >= 0) & (col < n), other=float("-inf"))
    return tl.where(col == y[:, None], float("-inf"), s.to(tl.float32))


@triton.jit
def store(
    out_ptr, values, selected, shift, tile, n: tl.constexpr, R: tl.constexpr, N: tl.constexpr, SHIFTED: tl.constexpr
):
    """Write a tile of R rows: the numbers ``values`` [R, N], for each row with True in ``selected`` [R].

    If R is 1, the tile is written even if ``selected`` is False, so the caller must check ``selected``.
    """
    place = tile * N + tl.arange(0, N)[None, :]
    pointers = out_ptr[:, None] + place
    values = values.to(out_ptr.dtype.element_ty)
    if R == 1 and not SHIFTED:
        if (tile + 1) * N <= n:
            tl.store(pointers, values)
        else:
            tl.store(pointers, values, mask=place < n)
    elif R == 1:
        if (tile > 0) & ((tile + 1) * N <= n):
            tl.store(pointers, values)
        else:
            store_masked(pointers, values, place - shift[:, None], n)
    else:
        tl.store(pointers, values, mask=selected[:, None] & (place < n))


@triton.jit
def store_masked(pointers, values, col, n: tl.constexpr):
    tl.store(pointers, values, mask=(col >= 0) & (col < n))


@triton.jit
def clear(
    value_ptr, gradient_ptr, row, shift, selected,
    n: tl.constexpr, R: tl.constexpr, N: tl.constexpr, TILES: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """For each of R rows, write loss 0 and gradient 0 if the row has True in ``selected`` [R].

    If R is 1, the gradient 0 is written even if ``selected`` is False, so the caller must check ``selected``.
    """
    tl.store(value_ptr + row, tl.zeros((R,), tl.float32), mask=selected)
    for tile in range(TILES):
        store(gradient_ptr, tl.zeros((R, N), tl.float32), selected, shift, tile, n, R, N, SHIFTED)


@triton.jit
def tiles_of(
    s_ptr, live, y, shift, n: tl.constexpr, R: tl.constexpr, N: tl.constexpr, TILES: tl.constexpr,
    CACHED: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    cached = ()
    if CACHED:
        for tile in tl.static_range(TILES):
            cached = cached + (others(s_ptr, live, y, shift, tile, n, R, N, SHIFTED),)
    return cached


@triton.jit
def tiles_and_largest(
    s_ptr, live, y, shift,
    n: tl.constexpr, R: tl.constexpr, N: tl.constexpr, TILES: tl.constexpr, CACHED: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """Return (tiles, largest) for R rows, each divided into tiles of N scores.

    If ``CACHED`` is set, ``tiles`` contains all tiles. Otherwise, ``tiles`` is (). ``largest`` [R] is the largest score
    of each row. The score of the label ``y`` does not count.
    """
    cached = tiles_of(s_ptr, live, y, shift, n, R, N, TILES, CACHED, SHIFTED)
    if CACHED:
        best = cached[0]
        for tile in tl.static_range(1, TILES):
            best = tl.maximum(best, cached[tile])
    else:
        best = tl.full((R, N), float("-inf"), tl.float32)
        for tile in tl.range(TILES, loop_unroll_factor=2):
            best = tl.maximum(best, others(s_ptr, live, y, shift, tile, n, R, N, SHIFTED))
    return cached, tl.max(best, 1)


@triton.jit
def classes(shift, tile, n: tl.constexpr, N: tl.constexpr, SHIFTED: tl.constexpr):
    """Return the class of each entry of a tile, and whether the entry is inside of the row."""
    col = tile * N + tl.arange(0, N)[None, :]
    if not SHIFTED:
        there = col < n
    else:
        col = col - shift[:, None]
        there = (col >= 0) & (col < n)
    return col, there
