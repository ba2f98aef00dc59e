"""The perturbed k-th largest score and its hinge on the CPU, compiled by numba. Noise is generated only where needed.

Each row has four steps: the height, the candidates of each draw, their noise, and the k-th largest. See README.md.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOptionalMemberAccess=false
# numba's intrinsics are called without their first parameter

from typing import Any

import numpy as np
import torch
from torch import Tensor

from topk_registry.ops.cpu.driver import kernel, spans
from topk_registry.ops.cpu.masks import lowest_bit, number_of_bits, reaching, within
from topk_registry.ops.cpu.memory import address_of, array, empty
from topk_registry.ops.cpu.numbers import compiled, inlined, summing
from topk_registry.ops.perturbed import height as heights
from topk_registry.ops.perturbed.height import FLOOR, HOPELESS, find_height, in_reach, limits, tails
from topk_registry.ops.perturbed.noise import AT_ONCE, CALLS_AT_ONCE, FIRST_BYTES, TABLE, normals_of, philox_of, table
from topk_registry.ops.tensors import laid_out

LEAST_WORK = 1 << 15  # minimum of scores times draws per thread: about 20 microseconds of work
SCORES_AT_ONCE = 1 << 14  # maximum number of scores that a thread takes at a time
RANKED = 32  # number of candidates that are ranked without a branch
LAST = (1 << 64) - 1
LISTED = 4  # candidates per 64 classes that are listed without a branch; most blocks have at most one


def kth(scores: Tensor, seed: Tensor, k: int, epsilon: float, num_samples: int) -> tuple[Tensor, Tensor]:
    """Return the mean k-th largest score [B] over the draws, and its class in each draw [B, num_samples].

    Args:
        scores: [B, n] in single precision.
        seed: int64 []. The noise is a function of the seed, the row index, the draw and the class.
        k, epsilon, num_samples: rank, standard deviation of the noise, number of draws.
    """
    s = laid_out(scores.detach(), torch.float32)
    B, n = s.shape
    value, index = s.new_empty(B), s.new_empty(B, num_samples, dtype=torch.int64)
    threads, block = _threads_and_block(B, n, num_samples)
    if B:
        kth_body.run(
            threads, B, n, k, num_samples, block, int(seed), float(epsilon), s, table(), value, index
        )  # fmt: skip
    return value, index


def hinge(
    scores: Tensor, masses: Any, seed: Tensor, k: int, epsilon: float, num_samples: int, alpha: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the losses sum_c q_c scale (alpha_c + f(s) - s_c)_+ [B] and their gradient [B, n], f as in :func:`kth`.

    Args:
        scores, seed, k, epsilon, num_samples: as in :func:`kth`.
        masses: an object with ``labels``, ``shares``, ``even`` and ``dense``.
        alpha: required margin [] or [n].
        scale: factor of the loss.
    """
    s = laid_out(scores, torch.float32)
    B, n = s.shape
    value, gradient = s.new_empty(B), torch.empty_like(s)
    threads, block = _threads_and_block(B, n, num_samples)
    labels = None if masses.labels is None else laid_out(masses.labels, torch.int64)
    shares = None if masses.shares is None else laid_out(masses.shares, torch.float64)
    even = None if masses.even is None else laid_out(masses.even, torch.float64)
    dense = None if masses.dense is None else laid_out(masses.dense, torch.float32)
    gap = laid_out(alpha, torch.float64)
    if B:
        hinge_body.run(
            threads, B, n, k, num_samples, block, int(seed), float(epsilon), s, table(), value, gradient,
            0 if labels is None else labels.shape[1], gap.numel(), float(scale), gap, labels, shares, even, dense,
        )  # fmt: skip
    return value, gradient


def _threads_and_block(B: int, n: int, draws: int) -> tuple[int, int]:
    threads = max(1, min(torch.get_num_threads(), B, B * n * draws // LEAST_WORK))
    return threads, max(1, min(SCORES_AT_ONCE // n, -(-B // threads)))


@kernel
def kth_body(job):
    """Compute rows of :func:`kth`."""
    _, B, n, k, draws, block, _ = array(job, 7, np.int64)
    epsilon, address = array(job, 8, np.float64)[7], array(job, 12, np.int64)[8:]
    s, quantiles = array(address[0], (B, n), np.float32), array(address[1], TABLE, np.float64)
    value, index = array(address[2], B, np.float32), array(address[3], (B, draws), np.int64)
    key, rank, guess = array(job, 14, np.uint32)[12:], min(k, n + 1 - k), 0.0
    space, negative = scratch(n, rank, draws), empty(n, np.float32)
    for start, stop in spans(job, block, B):
        for r in range(start, stop):
            value[r], guess = threshold(s[r], r, k, epsilon, key, quantiles, index[r], guess, space, negative)


@kernel
def hinge_body(job):
    """Compute rows of :func:`hinge`."""
    _, B, n, k, draws, block, _ = array(job, 7, np.int64)
    field, real = array(job, 20, np.int64), array(job, 20, np.float64)
    s, quantiles = array(field[8], (B, n), np.float32), array(field[9], TABLE, np.float64)
    value, gradient = array(field[10], B, np.float32), array(field[11], (B, n), np.float32)
    m, gaps, epsilon, scale = field[12], field[13], real[7], real[14]
    alpha, labels = array(field[15], gaps, np.float64), array(field[16], (B, m), np.int64)
    shares = array(field[17], (B, m), np.float64)
    even = array(field[18], B if field[18] != 0 else 0, np.float64)
    dense = array(field[19], (B if field[19] != 0 else 0, n), np.float32)
    key, rank, guess = array(job, 14, np.uint32)[12:], min(k, n + 1 - k), 0.0
    space, negative, q = scratch(n, rank, draws), empty(n, np.float32), empty(n, np.float32)
    index = places(space, draws)
    for start, stop in spans(job, block, B):
        for r in range(start, stop):
            g, few, spread = gradient[r], True, 0.0
            if len(even):
                spread = even[r]
                few = few and spread == 0
            if len(dense):
                few = few and not _any(dense[r])
            g[:] = 0
            if few and not _any(shares[r]):
                value[r] = 0
                continue
            t, guess = threshold(s[r], r, k, epsilon, key, quantiles, index, guess, space, negative)
            if t != t:
                value[r] = np.nan
                g[:] = np.nan
                continue
            cost, slope = 0.0, 0.0
            if not few:
                if len(dense):
                    q[:] = dense[r]
                else:
                    q[:] = np.float32(0)
                cost, slope = hinges(s[r], q, np.float32(spread), t, alpha, scale, g)
            for j in range(m):
                y, share = labels[r, j], shares[r, j]
                violation = alpha[y if gaps > 1 else 0] + (t - np.float64(s[r, y]))
                if share != 0 and violation >= 0:
                    cost += share * scale * violation
                    slope += share * scale
                    g[y] -= np.float32(share * scale)
                elif share != 0 and violation != violation:
                    cost = np.nan
            value[r] = cost
            step = np.float32(slope / draws)
            for i in index:
                g[i] += step


@compiled
def _any(x):
    for i in range(len(x)):  # noqa: SIM110 (numba compiles no generators)
        if x[i] != 0:
            return True
    return False


@compiled
def hinges(s, q, spread, threshold, alpha, scale, g):
    """Return the sum of hinges with masses q + spread, and its derivative in the threshold; write the gradient g."""
    value, slope = 0.0, 0.0
    for start in range(0, len(s), 256):
        stop = start + 256
        gap = alpha[start:stop] if len(alpha) > 1 else alpha
        costs, masses = _hinges(
            s[start:stop], q[start:stop], spread, np.float32(threshold), gap, np.float32(scale), g[start:stop]
        )
        value += np.float64(costs)
        slope += np.float64(masses)
    return scale * value, scale * slope


@summing
def _hinges(s, q, spread, threshold, alpha, scale, g):
    """Return the sum of mass times violation, and the sum of masses, over the classes that violate their margin."""
    value, slope, zero = np.float32(0), np.float32(0), np.float32(0)
    if len(alpha) > 1:
        for i in range(len(s)):
            violation = np.float32(alpha[i]) + (threshold - s[i])
            mass = q[i] + spread if violation >= zero else zero
            value += mass * violation if mass != zero else zero  # 0 times infinity counts as 0
            slope += mass
            g[i] = -scale * mass
    else:
        gap = np.float32(alpha[0])
        for i in range(len(s)):
            violation = gap + (threshold - s[i])
            mass = q[i] + spread if violation >= zero else zero
            value += mass * violation if mass != zero else zero
            slope += mass
            g[i] = -scale * mass
    return value, slope


@compiled
def threshold(row, r, k, epsilon, key, quantiles, index, guess, space, negative):
    """Return :func:`of_row` for any k, counted from the nearer end. ``negative`` is memory [n]."""
    n = len(row)
    if 2 * k <= n + 1:
        return of_row(row, r, k, epsilon, key, quantiles, index, guess, space)
    for i in range(n):
        negative[i] = -row[i]
    value, guess = of_row(negative, r, n + 1 - k, epsilon, key, quantiles, index, guess, space)
    return -value, guess


@compiled
def _count_up(places):
    for i in range(len(places)):
        places[i] = i


@compiled
def scratch(n, k, draws):
    """Return scratch memory for :func:`of_row` as one array, because each allocation costs time."""
    blocks, calls, listed, lines = _sizes(n, k, draws)
    numbers = 16 * 2 * blocks + blocks + 3 * calls + 4 * listed + lines + RANKED + 2 * draws + 1
    return empty(8 * numbers + 16 * blocks + 64 + listed, np.uint8)


@compiled
def places(space, draws):
    return array(address_of(space), draws, np.int64)


@compiled
def _sizes(n, k, draws):
    """Return sizes: blocks of 16 classes, generator calls per block, listed classes, lines of the maximum search."""
    blocks = (n + 15) // 16
    size = min(draws * blocks, max(CALLS_AT_ONCE, blocks))
    return blocks, size + AT_ONCE, 16 * size + AT_ONCE, heights.lines(n, k)


@compiled
def of_row(row, r, k, epsilon, key, quantiles, index, guess, space):
    """Return the mean over draws of the k-th largest perturbed score, and a guess for the next row; 2 k <= n + 1.

    Args:
        row: scores [n].
        r: row index in the batch. Row index, key, draw and class determine the noise.
        index: output, the class that is k-th at each draw [draws].
        guess: guess of the height that k scores of a draw reach. NaN if most classes of the last row could not reach
            it. The guess affects the time only.
        space: memory from :func:`scratch`.
    """
    draws, n, real = len(index), len(row), row.dtype.type
    blocks, size, listed, lines = _sizes(n, k, draws)
    at = address_of(space) + 8 * draws  # reference counts of numba arrays would cost as much as the work on the arrays
    packed, at = array(at, 16 * blocks, row.dtype), at + 128 * blocks
    maxima, at = array(at, lines, row.dtype), at + 8 * lines
    few, at = array(at, RANKED, np.float64), at + 8 * RANKED
    z, at = array(at, listed, np.float64), at + 8 * listed
    slot, at = array(at, listed, np.uint64), at + 8 * listed
    place, at = array(at, listed, np.int64), at + 8 * listed
    calls, at = array(at, size, np.int64), at + 8 * size
    active, at = array(at, blocks, np.int64), at + 8 * blocks
    words, at = array(at, 2 * size, np.int64), at + 16 * size
    starts, at = array(at, draws + 1, np.int64), at + 8 * (draws + 1)
    bits, at = array(at, 16 * blocks, np.int32), at + 64 * blocks
    limit, at = array(at, 16 * blocks + 64, np.uint8), at + 16 * blocks + 64
    first = array(at, listed, np.uint8)

    scores, held, floor, near, height = row, 0, -np.inf, 0.0, 0.0
    if guess != guess:
        if _has_nan(row):
            index[:] = 0
            return np.nan, guess
        held, near = in_reach(row, k, epsilon, maxima, active, packed)
        if held > 0:
            scores, floor = packed[: 16 * held], near - FLOOR * epsilon
            height, _, _, _ = find_height(scores, k, epsilon, near, bits)
        guess = np.nan if 0 < 2 * held <= blocks else 0.0
    if held == 0 or height < floor:
        scores, held, floor = row, blocks, -np.inf
        height, next_guess, lowest, broken = find_height(row, k, epsilon, guess if guess == guess else near, bits)
        if broken:
            index[:] = 0
            return np.nan, 0.0
        _count_up(active)
        guess = np.nan if lowest <= HOPELESS and lines > 0 else next_guess
    elif guess == guess:
        guess = height
    guess = guess if guess - guess == 0 or guess != guess else 0.0
    _limits(scores, height, bits, held, limit)
    total, draw, lower = 0.0, 0, 0.5 * epsilon
    while draw < draws:
        stride = min(draws - draw, max(1, CALLS_AT_ONCE // held))
        for d in range(stride):
            for a in range(held):
                calls[d * held + a] = (draw + d) * blocks + active[a]
        made = (stride * held + AT_ONCE - 1) // AT_ONCE * AT_ONCE
        calls[stride * held : made] = 0
        philox_of(calls[:made], r, FIRST_BYTES, key, words)
        _passing(calls, words, limit, held, stride, slot, place, first, starts)
        normals_of(place[: starts[stride]], first, r, key, quantiles, z)
        for d in range(stride):
            low, high = starts[d], starts[d + 1]
            m = _above(scores, height, epsilon, slot[low:high], z[low:high])
            if m < k:
                break
            j = _kth(z[low : low + m], k, few)
            total += z[low + j]
            which = np.int64(slot[low + j])
            index[draw] = 16 * active[which >> 4] + (which & 15)
            draw += 1
        else:
            continue
        height = np.float64(real(height - lower if lower < 8 * epsilon else -np.inf))
        lower *= 2
        if height < floor:
            scores, held, floor = row, blocks, -np.inf
            _count_up(active)
        tails(scores, real(height), real(1 / epsilon), bits)
        _limits(scores, height, bits, held, limit)
    return total / draws, guess


@compiled
def _has_nan(row):
    nans = 0
    for i in range(len(row)):
        nans += row[i] != row[i]
    return nans > 0


@compiled
def _limits(scores, height, bits, held, limit):
    """Write the limits of the classes in ``held`` blocks. The last block may be incomplete."""
    if height == -np.inf:
        limit[: 16 * held] = 255
    else:
        limits(bits[: len(scores)], limit)
        limit[len(scores) : 16 * held] = 0


@compiled
def _passing(calls, words, limit, held, stride, slot, place, first, starts):
    """List the classes whose first byte is within the limit; classes of draw d begin at starts[d].

    ``slot`` gets their positions in the ``held`` blocks, ``place`` their indices among all classes and draws, and
    ``first`` their first bytes.
    """
    byte, size, m = array(address_of(words), 8 * len(words), np.uint8), 16 * held, 0
    whole = size // 64 * 64
    for d in range(stride):
        of_draw, of_blocks = byte[d * size : (d + 1) * size], calls[d * held : (d + 1) * held]
        starts[d], listed, low = m, slot[m:], m
        m = 0
        for start in range(0, whole, 64):
            m = _listed(within(of_draw, start, limit, start), start, listed, m)
        if whole < size:
            rest = (np.uint64(1) << np.uint64(size - whole)) - np.uint64(1)
            m = _listed(within(of_draw, whole, limit, whole) & rest, whole, listed, m)
        of_first, places = first[low : low + m], place[low : low + m]
        for j in range(m):
            i = listed[j]
            of_first[j], places[j] = of_draw[i], 16 * of_blocks[i >> np.uint64(4)] + np.int64(i & np.uint64(15))
        m += low
    starts[stride] = m


@inlined
def _listed(passed, start, listed, m):
    """Append the positions of bits to ``listed`` from ``m`` on, and return its new length."""
    count, where = number_of_bits(passed), listed[m:]
    for j in range(LISTED):
        where[j] = start + lowest_bit(passed)
        passed &= passed - np.uint64(1)
    for j in range(LISTED, count):
        where[j] = start + lowest_bit(passed)
        passed &= passed - np.uint64(1)
    return m + count


@compiled
def _above(scores, height, epsilon, slot, z):
    """Move the perturbed scores that reach the height to the front, with their positions; return their number."""
    m, n = np.uint64(0), np.uint64(len(scores))
    for j in range(len(slot)):
        i = slot[j]
        if i < n:
            v = np.float64(scores[i]) + epsilon * z[j]
            z[m], slot[m] = v, i
            m += np.uint64(v >= height)
    return np.int64(m)


@compiled
def _kth(v, k, few):
    """Return the position of the k-th largest."""
    m = len(v)
    if m > RANKED:
        return _kth_of_many(v, k)
    if m <= 16:
        return _kth_of(v, k, few[:16])
    return _kth_of(v, k, few)


@inlined
def _kth_of(v, k, few):
    few[:] = -np.inf
    for i in range(len(v)):
        few[i] = v[i]
    least = np.uint64(LAST)  # how many more than k reach it, and its position
    for j in range(len(v)):
        reached = 0
        for start in range(0, len(few), 16):
            reached += number_of_bits(reaching(few, start, few[j]))
        least = min(least, np.uint64((reached - k) * RANKED + j))  # a large number if fewer than k reach it
    return np.int64(least) & (RANKED - 1)


@compiled
def _kth_of_many(v, k):
    """Return the position of the k-th largest. Each ranked candidate bounds the candidates that remain.

    The m log m steps for m numbers are vector instructions without branches.
    """
    low, high, bounded_below, bounded_above = 0.0, 0.0, False, False
    for j in range(len(v)):
        x = v[j]
        if (bounded_below and x <= low) or (bounded_above and x >= high):
            continue
        above, reached = 0, 0
        for i in range(len(v)):
            above += v[i] > x
            reached += v[i] >= x
        if above >= k:
            low, bounded_below = x, True
        elif reached < k:
            high, bounded_above = x, True
        else:
            return j
    return -1
