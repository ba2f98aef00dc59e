# type: ignore
"""Functions of rows for the kernels: power sums, and the top group. README.md of ``ksubset`` defines the terms."""

import triton
import triton.language as tl

from topk_registry.ops.gpu.tiles import others
from topk_registry.ops.ksubset.triton.polynomial import CAP, is_finite, lane_of, least_rest, tail_polynomial

LIMIT = tl.constexpr(0.5)  # maximum odds in the tail
BALANCING = tl.constexpr(4)  # Newton steps for the tilt, which need not be precise
REBALANCING = tl.constexpr(2)  # Newton steps after a class has joined the group, from the previous tilt


@triton.jit
def flat_rows(sums, usable, k: tl.constexpr):
    """Return which of the usable rows are flat, their tilt ``base``, and coefficients 0..k of their polynomials.

    ``sums`` are sums of k powers of odds relative to the largest score, per position in a tile.
    """
    mass = tl.sum(sums[0], 1)  # NaN if a score is NaN or all are -inf
    flat = usable & (mass * LIMIT >= k)
    base = tl.where(flat, k / mass, 1.0)
    P = (mass * base,)
    power = base
    for j in tl.static_range(1, k):
        power = power * base
        P = P + (tl.sum(sums[j], 1) * power,)
    return flat, base, tail_polynomial(P, k)


@triton.jit
def powers(w, k: tl.constexpr):
    out = (w,)
    for j in tl.static_range(2, k + 1):
        out = out + (out[j // 2 - 1] * out[j // 2 - 1] if j % 2 == 0 else out[j - 2] * w,)
    return out


@triton.jit
def add(a, b, k: tl.constexpr):
    out = ()
    for j in tl.static_range(k):
        out = out + (a[j] + b[j],)
    return out


@triton.jit
def balanced(c, back, of_margin, k: tl.constexpr):
    """Return of_margin times the coefficients up to k-2 of c, tilted such that the next two are 1.

    back = c_k / c_{k-1}
    """
    out = ()
    rho = of_margin * (back * back / c[k])
    for j in tl.static_range(2, k + 1):
        out = (c[k - j] * rho,) + out
        rho = rho * back
    return out


@triton.jit
def columns(numbers, count: tl.constexpr):
    out = ()
    for j in tl.static_range(count):
        out = out + (numbers[j][:, None],)
    return out


@triton.jit
def number(tile):
    return tl.sum(tl.sum(tile, 1), 0)


@triton.jit
def top_group(
    held, scores_ptr, live, y, shift, known, depth, inverse,
    k: tl.constexpr, TP: tl.constexpr, LANES: tl.constexpr,
    n: tl.constexpr, N: tl.constexpr, TILES: tl.constexpr, HELD: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """Split a row: find the k largest classes one maximum at a time, then all classes with odds above LIMIT.

    ``held`` are the tiles of the row if they are in registers.

    Returns scores and classes of the group as lanes, where lanes i and i + TP have the i-th largest; the size of the
    group; the reference a of odds; the tilt u; the score and class after which the tail begins; and whether the row is
    invalid: not ``known``, with NaN, or with too few scores. ``depth`` is k as a variable, because the compiler would
    unroll loops over a constant and run out of registers.
    """
    lane = tl.arange(0, LANES)
    member = lane % TP
    top = tl.full((LANES,), float("-inf"), tl.float32)
    where = tl.full((LANES,), n, tl.int32)
    v = depth * float("inf")
    i = depth - k - 1
    tiles = TILES + depth - k
    for f in range(depth):
        v, i = next_largest(held, scores_ptr, live, y, shift, v, i, n, N, TILES, tiles, HELD, SHIFTED)
        top = tl.where(member == f, v, top)
        where = tl.where(member == f, i, where)
    a = v
    odds = tl.zeros((1, N), tl.float32)
    if HELD:
        for tile in tl.static_range(TILES):
            odds += odds_after(held[tile], shift, tile, a, v, i, inverse, N)
    else:
        for tile in range(tiles):
            odds += tail_odds(scores_ptr, live, y, shift, tile, a, v, i, inverse, n, N, SHIFTED)
    mass = number(odds)
    broken = (is_finite(a) == 0) | (known == 0) | (mass != mass)

    size = depth
    first = lane < TP
    u = balance(tl.where(first, (top - a) * inverse, float("-inf")), mass, lane, depth, k)
    v, i = next_largest(held, scores_ptr, live, y, shift, v, i, n, N, TILES, tiles, HELD, SHIFTED)
    w = tl.exp((v - a) * inverse)
    while (broken == 0) & (w * u > LIMIT) & (size < TP - 1):
        # u grows when a class joins the group, because the tail overestimates its contribution
        top = tl.where(member == size, v, top)
        where = tl.where(member == size, i, where)
        size += 1
        mass = tl.maximum(mass - w, 0.0)
        E = tl.exp(tl.minimum(tl.where(first, (top - a) * inverse, float("-inf")), CAP))
        u = newton(u, E, mass, depth - k + REBALANCING, k)
        v, i = next_largest(held, scores_ptr, live, y, shift, v, i, n, N, TILES, tiles, HELD, SHIFTED)
        w = tl.exp((v - a) * inverse)
    # the last of the k largest classes may belong to the tail as well
    chosen = (lane < size) & (tl.exp(tl.minimum((top - a) * inverse, CAP)) * u > LIMIT)
    size = tl.sum(chosen.to(tl.int32), 0)
    v = tl.where(size > 0, lane_of(top, lane, size - 1), float("inf"))
    i = tl.where(size > 0, tl.sum(tl.where(lane == size - 1, where, 0), 0), -1)
    return top, where, size, a, u, v, i, broken


@triton.jit
def tail_powers(
    held, scores_ptr, live, y, shift, a, u, v, i, inverse, tiles,
    k: tl.constexpr, n: tl.constexpr, N: tl.constexpr, TILES: tl.constexpr, HELD: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """Return P_1..P_k of the tail's odds times u, as numbers."""
    sums = powers(tl.zeros((1, N), tl.float32), k)
    if HELD:
        for tile in tl.static_range(TILES):
            sums = add(sums, powers(odds_after(held[tile], shift, tile, a, v, i, inverse, N) * u, k), k)
    else:
        for tile in range(tiles):
            odds = tail_odds(scores_ptr, live, y, shift, tile, a, v, i, inverse, n, N, SHIFTED)
            sums = add(sums, powers(odds * u, k), k)
    P = ()
    for j in tl.static_range(k):
        P = P + (number(sums[j]),)
    return P


@triton.jit
def next_largest(
    held, s_ptr, live, y, shift, v, i,
    n: tl.constexpr, N: tl.constexpr, TILES: tl.constexpr, tiles, HELD: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """Return the largest score after v at i and its class, with ties in class order. If there is none, -inf and n."""
    best = tl.full((1, N), float("-inf"), tl.float32)
    at = tl.full((1, N), n, tl.int32)
    if HELD:
        for tile in tl.static_range(TILES):
            best, at = larger(held[tile], shift, tile, v, i, best, at, N)
    else:
        for tile in range(tiles):
            best, at = larger(others(s_ptr, live, y, shift, tile, n, 1, N, SHIFTED), shift, tile, v, i, best, at, N)
    v = largest(best)
    return v, tl.min(tl.min(tl.where(best == v, at, n), 1), 0)


@triton.jit
def larger(s, shift, tile, v, i, best, at, N: tl.constexpr):
    """Update the largest score after v at i, and its class, with the scores of a tile."""
    col = tile * N + tl.arange(0, N)[None, :] - shift[:, None]
    better = ((s < v) | ((s == v) & (col > i))) & (s > best)
    return tl.where(better, s, best), tl.where(better, col, at)


@triton.jit
def largest(x):
    """Return the largest number of a tile of one row. The tile must not contain NaN."""
    # as integers in the same order: a warp finds the maximum of integers in one instruction
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    best = tl.max(tl.max(bits ^ ((bits >> 31) & 0x7FFFFFFF), 1), 0)
    return (best ^ ((best >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def tail_odds(s_ptr, live, y, shift, tile, a, v, i, inverse, n: tl.constexpr, N: tl.constexpr, SHIFTED: tl.constexpr):
    """Return exp((s - a) / theta) for classes after score v at i, and 0 for all others. NaN stays NaN."""
    return odds_after(others(s_ptr, live, y, shift, tile, n, 1, N, SHIFTED), shift, tile, a, v, i, inverse, N)


@triton.jit
def odds_after(s, shift, tile, a, v, i, inverse, N: tl.constexpr):
    """Return :func:`tail_odds` for the scores of a tile."""
    col = tile * N + tl.arange(0, N)[None, :] - shift[:, None]
    in_group = (s > v) | ((s == v) & (col <= i))
    return tl.where(in_group, 0.0, tl.exp((s - a) * inverse))


@triton.jit
def balance(x, mass, lane, depth, k: tl.constexpr):
    """Return the tilt u with about k - 1/2 expected classes, from the top group and the mass of the tail."""
    E = tl.exp(tl.minimum(x, CAP))
    # draws k/2 to k classes: start of Newton's method
    return newton(1.0 / least_rest(x, mass, lane, k), E, mass, depth - k + BALANCING, k)


@triton.jit
def newton(u, E, mass, steps, k: tl.constexpr):
    """Return u after Newton steps towards k - 1/2 expected classes.

    u stays below the solution, because the number of classes is concave in u.
    """
    for _ in range(steps):
        q = 1.0 / (1.0 + E * u)
        drawn = mass * u + tl.sum(E * u * q, 0)
        slope = mass + tl.sum(E * q * q, 0)
        u += (k - 0.5 - drawn) / slope
    return u
