# type: ignore
"""Functions of the Triton kernels that compute sums of powers of odds, and find the classes with large odds."""

import triton
import triton.language as tl

from topk_registry.ops.gpu.tiles import others
from topk_registry.ops.ksubset.triton.polynomial import CAP, is_finite, lane_of, least_rest, tail_polynomial

LIMIT = tl.constexpr(0.5)  # classes with larger odds belong to the top group
BALANCING = tl.constexpr(4)  # number of Newton steps for the tilt, which need not be precise
REBALANCING = tl.constexpr(2)  # number of Newton steps from the previous tilt, after a class has joined the top group


@triton.jit
def flat_rows(sums, usable, k: tl.constexpr):
    """Find the flat rows: the rows in which no softmax probability exceeds 1 / (2 k).

    In a flat row, the polynomial of all classes is computed from power sums of the odds w = exp((s - max s) / theta).

    Args:
        sums: k arrays [R, N] for R rows. Row r of array j - 1 adds up to the sum of w^j over all classes of row r.
        usable: False for rows that must not count as flat [R].
        k: as in top-k.

    Returns:
        (flat, base, c). ``flat`` [R] tells which rows are flat. ``base`` [R] is k / sum(w) for flat rows, else 1. c
        contains the coefficients 0..k of prod_i (1 + base w_i X), times a common factor.
    """
    mass = tl.sum(sums[0], 1)  # NaN if a score is NaN, or if all scores are -inf
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
    """Return the balanced coefficients c_j / (c_k rho^(k-j)) of c, times a number ``of_margin``, for j = 0..k-2.

    Here, rho is c_{k-1} / c_k, and ``back`` is 1 / rho. The balanced coefficients k - 1 and k are 1 for every c.
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
    scores_ptr, live, y, shift, known, depth, inverse,
    k: tl.constexpr, TP: tl.constexpr, LANES: tl.constexpr,
    n: tl.constexpr, N: tl.constexpr, TILES: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """Find the top group of one row: the classes with w u above the constant LIMIT.

    The odds of a class with score s are w = exp((s - a) * inverse), where a is the depth-th largest score. The number u
    is such that the sum of w u / (1 + w u) over all classes is about depth - 1/2. The function finds the classes in
    descending order of their scores.

    Args:
        scores_ptr, live, y, shift: position of the row, see :func:`tiles.others`. Class y is left out.
        known: if False, the row is invalid.
        depth: k, but not a constant. The compiler would unroll loops over a constant, and run out of registers.
        inverse: 1 / theta, the reciprocal of the temperature.
        TP, LANES: maximum number of classes, and length of ``top`` and ``where``, which is TP or 2 TP.

    Returns:
        (top, where, size, a, u, v, i, broken). ``top`` and ``where`` hold the scores and the indices of the classes in
        descending order of scores. If LANES is 2 TP, the second half repeats the first half. ``size`` is the number of
        classes in the group. The last class of the group is class i with score v. ``broken`` is True if ``known`` is
        False, if the row contains NaN, or if a is not finite.
    """
    lane = tl.arange(0, LANES)
    member = lane % TP
    top = tl.full((LANES,), float("-inf"), tl.float32)
    where = tl.full((LANES,), n, tl.int32)
    v = depth * float("inf")
    i = depth - k - 1
    tiles = TILES + depth - k
    for f in range(depth):
        v, i = next_largest(scores_ptr, live, y, shift, v, i, n, N, tiles, SHIFTED)
        top = tl.where(member == f, v, top)
        where = tl.where(member == f, i, where)
    a = v
    odds = tl.zeros((1, N), tl.float32)
    for tile in range(tiles):
        odds += tail_odds(scores_ptr, live, y, shift, tile, a, v, i, inverse, n, N, SHIFTED)
    mass = number(odds)
    broken = (is_finite(a) == 0) | (known == 0) | (mass != mass)

    size = depth
    first = lane < TP
    u = balance(tl.where(first, (top - a) * inverse, float("-inf")), mass, lane, depth, k)
    v, i = next_largest(scores_ptr, live, y, shift, v, i, n, N, tiles, SHIFTED)
    w = tl.exp((v - a) * inverse)
    while (broken == 0) & (w * u > LIMIT) & (size < TP - 1):
        # u grows when a class joins the group, because the sum over the tail counts u w in place of u w / (1 + u w)
        top = tl.where(member == size, v, top)
        where = tl.where(member == size, i, where)
        size += 1
        mass = tl.maximum(mass - w, 0.0)
        E = tl.exp(tl.minimum(tl.where(first, (top - a) * inverse, float("-inf")), CAP))
        u = newton(u, E, mass, depth - k + REBALANCING, k)
        v, i = next_largest(scores_ptr, live, y, shift, v, i, n, N, tiles, SHIFTED)
        w = tl.exp((v - a) * inverse)
    # some of the ``depth`` largest classes may belong to the tail
    chosen = (lane < size) & (tl.exp(tl.minimum((top - a) * inverse, CAP)) * u > LIMIT)
    size = tl.sum(chosen.to(tl.int32), 0)
    v = tl.where(size > 0, lane_of(top, lane, size - 1), float("inf"))
    i = tl.where(size > 0, tl.sum(tl.where(lane == size - 1, where, 0), 0), -1)
    return top, where, size, a, u, v, i, broken


@triton.jit
def tail_powers(
    scores_ptr, live, y, shift, a, u, v, i, inverse, tiles,
    k: tl.constexpr, n: tl.constexpr, N: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """Return the sums of (u w)^j for j = 1..k, where w are the odds exp((s - a) * inverse) of classes.

    The sums are over the tail: all classes that are not in the top group. The last class of the top group is class i
    with score v. ``tiles`` is TILES as a variable, so loops are not unrolled. Other arguments: see :func:`top_group`.
    """
    sums = powers(tl.zeros((1, N), tl.float32), k)
    for tile in range(tiles):
        odds = tail_odds(scores_ptr, live, y, shift, tile, a, v, i, inverse, n, N, SHIFTED)
        sums = add(sums, powers(odds * u, k), k)
    P = ()
    for j in tl.static_range(k):
        P = P + (number(sums[j]),)
    return P


@triton.jit
def next_largest(
    s_ptr, live, y, shift, v, i, n: tl.constexpr, N: tl.constexpr, tiles, SHIFTED: tl.constexpr,
):  # fmt: skip
    """Return the score and the index of the class that follows class i in descending order of scores.

    Class i has the score v. Of equal scores, the lower index comes first. If no class follows, the result is (-inf, n).
    ``tiles`` is TILES as a variable, so loops are not unrolled. Other arguments: see :func:`top_group`.
    """
    best = tl.full((1, N), float("-inf"), tl.float32)
    at = tl.full((1, N), n, tl.int32)
    for tile in range(tiles):
        s = others(s_ptr, live, y, shift, tile, n, 1, N, SHIFTED)
        col = tile * N + tl.arange(0, N)[None, :] - shift[:, None]
        better = ((s < v) | ((s == v) & (col > i))) & (s > best)
        best = tl.where(better, s, best)
        at = tl.where(better, col, at)
    v = largest(best)
    return v, tl.min(tl.min(tl.where(best == v, at, n), 1), 0)


@triton.jit
def largest(x):
    """Return the largest number of a tile of one row. The tile must not contain NaN."""
    # as integers in the same order, because a warp finds the maximum of integers in one instruction
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    best = tl.max(tl.max(bits ^ ((bits >> 31) & 0x7FFFFFFF), 1), 0)
    return (best ^ ((best >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def tail_odds(s_ptr, live, y, shift, tile, a, v, i, inverse, n: tl.constexpr, N: tl.constexpr, SHIFTED: tl.constexpr):
    """Return the odds exp((s - a) * inverse) of the classes of a tile of scores. ``tile`` is the index of the tile.

    Classes of the top group, whose last class is class i with score v, get 0. If s is NaN, the odds are NaN.
    """
    s = others(s_ptr, live, y, shift, tile, n, 1, N, SHIFTED)
    col = tile * N + tl.arange(0, N)[None, :] - shift[:, None]
    in_group = (s > v) | ((s == v) & (col <= i))
    return tl.where(in_group, 0.0, tl.exp((s - a) * inverse))


@triton.jit
def balance(x, mass, lane, depth, k: tl.constexpr):
    """Return the number u for which sum_i u E_i / (1 + u E_i) + u mass is about k - 1/2, where E = exp(x) are odds.

    ``x`` contains the logarithms of the largest odds in descending order, followed by -inf. ``lane`` contains the
    indices of ``x``. ``mass`` is the sum of all other odds. ``depth`` is k as a variable, so loops are not unrolled.
    """
    E = tl.exp(tl.minimum(x, CAP))
    # begin where between k/2 and k classes are expected
    return newton(1.0 / least_rest(x, mass, lane, k), E, mass, depth - k + BALANCING, k)


@triton.jit
def newton(u, E, mass, steps, k: tl.constexpr):
    """Return u after ``steps`` Newton steps towards the solution of sum_i u E_i / (1 + u E_i) + u mass = k - 1/2.

    Because the left side is concave in u, u stays below the solution.
    """
    for _ in range(steps):
        q = 1.0 / (1.0 + E * u)
        drawn = mass * u + tl.sum(E * u * q, 0)
        slope = mass + tl.sum(E * q * q, 0)
        u += (k - 0.5 - drawn) / slope
    return u
