"""The perturbed k-th largest on the CPU: noise is made in the kernel, and only where it can matter.

The normal of a (row, draw, class) is Q^-1(U), with Q the upper tail of the normal distribution and U a uniform of 64
bits from a counter-based generator, so that any of them can be had without the others. A small U is a large normal. Its
first byte says how large at most, and for nearly all classes that is too little to be among the k largest: one call of
the generator makes the first bytes of 16 classes, and only the few that pass get their other bytes and their normal.
Which bytes pass depends on the row alone, by a height that more than k scores will probably reach; where they do not,
the draw is looked at again from lower down. So the height decides on the time, never on the result.
"""

import math
from functools import lru_cache

import numpy as np
import torch
from numba import njit
from torch import Tensor

_compiled = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})
_inlined = njit(nogil=True, error_model="numpy", fastmath={"contract"}, forceinline=True)
_summing = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc"})

PIECE = 512  # scores to work on at a time
GROUP = 512  # calls of the generator at a time
FIRST_BYTES, OTHER_BYTES = 0, 1  # what the generator is called for

# Philox4x32-10: Salmon, Moraes, Dror, Shaw, Parallel random numbers: as easy as 1, 2, 3, SC 2011
MULTIPLY_0, MULTIPLY_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
WEYL_0, WEYL_1 = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
HALF = np.uint64(32)
WHICH_BYTE = np.uint64(0x0001020304050607)  # times 2^(8 j) has j for its highest byte

# Q(x) < 2^-(1 + LINEAR x + SQUARE x^2) for 0 < x < 9.6, by less than 4 percent below 3.3
LINEAR, SQUARE = 1.001, 0.6125
HALF_BITS = np.float32(126 << 23)  # of 1/2 in single precision; an octave is 2^23
LINEAR_BITS, SQUARE_BITS = np.float32(LINEAR * 2**23), np.float32(SQUARE * 2**23)
SLOPE_0, SLOPE_1 = np.float32(LINEAR * math.log(2)), np.float32(2 * SQUARE * math.log(2))
HOPELESS = np.int32((127 - 66) << 23)  # the bits of 2^-66: no U is as small
FARTHEST = np.float32(12)
BYTES = np.float32(256.1)  # the tenth is for rounding

STEPS, DEGREE = 8, 5  # pieces of Q^-1 an octave, and the degree of their polynomials: right to 1e-9
MANTISSA = np.int64((1 << 52) // STEPS - 1)
LARGEST = np.int64((1 << 63) - 1)


def perturbed_kth(scores: Tensor, seed: Tensor, k: int, epsilon: float, num_samples: int) -> tuple[Tensor, Tensor]:
    """Mean k-th largest [rows] of scores [rows, n] over the draws, and which class it was in each [rows, draws].

    The noise is a function of the seed (int64 []), the row's place, the draw and the class.
    """
    if 2 * k > scores.shape[1] + 1:  # counted from the nearer end
        value, index = perturbed_kth(-scores, seed, scores.shape[1] + 1 - k, epsilon, num_samples)
        return -value, index
    value = scores.new_empty(len(scores))
    index = torch.empty(len(scores), num_samples, dtype=torch.int64)
    key = seed.reshape(1).numpy().view(np.uint32)
    _rows(scores.contiguous().numpy(), k, epsilon, key, normals(), value.numpy(), index.numpy(), 0, len(scores))
    return value, index


@lru_cache(maxsize=1)
def normals() -> np.ndarray:
    """Q^-1(2^-64 m) for m from 1/2 to 2^63, as polynomials in t: m = 2^(e-1) (1 + (step + t) / STEPS)."""
    nodes = (1 - np.cos(np.pi * (np.arange(DEGREE + 1) + 0.5) / (DEGREE + 1))) / 2
    octave, step = np.divmod(np.arange(64 * STEPS + 1), STEPS)
    u = (1 + (step[:, None] + nodes) / STEPS) * 2.0 ** (octave[:, None] - 65)
    z = -torch.special.ndtri(torch.from_numpy(u)).numpy()
    return np.ascontiguousarray(np.linalg.solve(np.vander(nodes), z.T).T)


@_compiled
def _rows(s, k, epsilon, key, table, value, index, start, stop):
    n, draws = s.shape[1], index.shape[1]
    blocks = (n + 15) // 16
    size = max(GROUP, blocks)
    bits, limit = np.zeros(16 * blocks, np.int32), np.zeros(16 * blocks, np.uint8)
    active, starts = np.empty(blocks, np.int64), np.empty(draws + 1, np.int64)
    calls, words, passed = np.empty(size, np.int64), np.empty(4 * size, np.uint32), np.empty(16 * size, np.uint8)
    some = np.empty(2 * size, np.int64)
    place, first, z = np.empty(16 * size, np.int64), np.empty(16 * size, np.uint8), np.empty(16 * size)
    guess = 0.0
    for r in range(start, stop):
        row = s[r]
        if _has_nan(row):
            value[r], index[r] = np.nan, 0
            continue
        height = _height(row, k, epsilon, guess, bits)
        guess = height if np.isfinite(height) else guess
        total, draw, lower = 0.0, 0, 0.5 * epsilon
        held = _limits(row, s.dtype.type(height), s.dtype.type(1 / epsilon), bits, limit, active)
        while draw < draws:
            stride = min(draws - draw, max(1, GROUP // held))
            for d in range(stride):
                for a in range(held):
                    calls[d * held + a] = (draw + d) * blocks + active[a]
            _philox_of(calls[: stride * held], r, FIRST_BYTES, key, words)
            _passing(calls, words, limit[: 16 * held], stride, passed, some, place, first, starts)
            _normals_of(place[: starts[stride]], first, r, key, table, words, z)
            for d in range(stride):
                low, high = starts[d], starts[d + 1]
                m = _above(row, height, epsilon, place[low:high], 16 * blocks * draw, z[low:high])
                if m < k:
                    break
                j = _kth(z[low : low + m], k)
                total += z[low + j]
                index[r, draw] = place[low + j]
                draw += 1
            else:
                continue
            height = height - lower if lower < 8 * epsilon else -np.inf
            lower *= 2
            held = _limits(row, s.dtype.type(height), s.dtype.type(1 / epsilon), bits, limit, active)
        value[r] = total / draws


@_compiled
def _has_nan(row):
    nans = 0
    for i in range(len(row)):
        nans += row[i] != row[i]
    return nans > 0


@_compiled
def _height(row, k, epsilon, guess, bits):
    """A height that all but surely k scores of a draw reach, and not many more; -inf if none is found."""
    few = k + 3 * math.sqrt(k) + 2
    if few >= len(row):
        return -np.inf
    low, high, height, reach = -np.inf, np.inf, guess, epsilon
    for trial in range(24):
        count, slope = _expected(row, row.dtype.type(height), row.dtype.type(1 / epsilon), bits)
        if count < few:
            high = height
        else:
            low = height
            if count <= 2 * few:
                break
        newton = height + epsilon * math.log(count / (1.4 * few)) * count / max(slope, 1e-3)
        if low < newton < high and trial % 4 < 3 and np.isfinite(low):
            height = newton
        elif np.isfinite(low) and np.isfinite(high):
            height = (low + high) / 2
        else:
            height = max(newton, height + reach) if count >= few else min(newton, height - reach)
            reach *= 8
    return low


@_summing
def _expected(row, height, inverse, bits):
    """How many scores may be expected above the height, a little overrated, and how fast the number falls with it."""
    count, slope = np.float32(0), np.float32(0)
    for start in range(0, len(row), PIECE):
        scores = row[start : start + PIECE]
        piece, q = bits[: len(scores)], bits[: len(scores)].view(np.float32)
        for i in range(len(scores)):
            piece[i] = _tail_bits((height - scores[i]) * inverse)
        for i in range(len(scores)):
            x = min(np.float32((height - scores[i]) * inverse), FARTHEST)
            count += q[i] if x > np.float32(0) else np.float32(1)
            slope += q[i] * (SLOPE_0 + SLOPE_1 * x) if x > np.float32(0) else np.float32(0)
    return np.float64(count), np.float64(slope)


@_inlined
def _tail_bits(x):
    """The bits of a number in single precision a little above Q(max(x, 0)): 2^-(1 + ...), linear within each octave."""
    x = min(max(np.float32(x), np.float32(0)), FARTHEST)
    return np.int32(HALF_BITS - x * (LINEAR_BITS + SQUARE_BITS * x))


@_compiled
def _limits(row, height, inverse, bits, limit, active):
    """The largest first byte of U with which a class can reach the height, and the blocks of 16 in which any can."""
    if height == -np.inf:
        limit[:] = 255
        active[:] = np.arange(len(active))
        return len(active)
    for i in range(len(row)):
        bits[i] = _tail_bits((height - row[i]) * inverse)
    q = bits.view(np.float32)
    for i in range(len(row)):
        limit[i] = np.uint8(np.int32(BYTES * q[i])) if row[i] < height else np.uint8(255)
    held = 0
    for b in range(len(active)):
        least = HOPELESS
        for i in range(16 * b, 16 * b + 16):
            least = max(least, bits[i])
        active[held] = b
        if held < b:
            limit[16 * held : 16 * held + 16] = limit[16 * b : 16 * b + 16]
        held += least > HOPELESS
    return held


@_inlined
def _philox(c0, c1, c2, c3, k0, k1):
    for _ in range(10):
        p0, p1 = MULTIPLY_0 * np.uint64(c0), MULTIPLY_1 * np.uint64(c2)
        c0, c2 = np.uint32(p1 >> HALF) ^ c1 ^ k0, np.uint32(p0 >> HALF) ^ c3 ^ k1
        c1, c3 = np.uint32(p1), np.uint32(p0)
        k0, k1 = np.uint32(k0 + WEYL_0), np.uint32(k1 + WEYL_1)
    return c0, c1, c2, c3


@_compiled
def _philox_of(calls, row, use, key, words):
    """Four words a call."""
    c2, c3 = np.uint32(row), np.uint32((row >> 32) * 2 + use)
    k0, k1 = key[0], key[1]
    for i in range(len(calls)):
        w0, w1, w2, w3 = _philox(np.uint32(calls[i]), np.uint32(calls[i] >> 32), c2, c3, k0, k1)
        words[4 * i] = w0
        words[4 * i + 1] = w1
        words[4 * i + 2] = w2
        words[4 * i + 3] = w3


@_compiled
def _passing(calls, words, limit, stride, passed, some, place, first, starts):
    """Places (draw, class) with a first byte within its limit, and that byte; draw d has those from starts[d] on."""
    byte, eight = words.view(np.uint8), passed.view(np.uint64)
    size, m = len(limit), 0
    starts[0] = 0
    for d in range(stride):
        start = d * size
        for i in range(size):
            passed[start + i] = byte[start + i] <= limit[i]
        held = 0
        for e in range(start >> 3, (start + size) >> 3):  # without a branch: which have some cannot be foretold
            some[held] = e
            held += eight[e] != 0
        for e in some[:held]:
            flags = eight[e]
            while flags:
                lowest = flags & (~flags + np.uint64(1))
                place[m] = 8 * e + np.int64(lowest * WHICH_BYTE >> np.uint64(56))
                flags ^= lowest
                m += 1
        starts[d + 1] = m
    for j in range(m):
        i = place[j]
        first[j], place[j] = byte[i], 16 * calls[i >> 4] + (i & 15)


@_compiled
def _normals_of(place, first, row, key, table, words, z):
    """The normals of these places, from their first bytes and a call of the generator for each."""
    for start in range(0, len(place), GROUP):
        here = place[start : start + GROUP]
        _philox_of(here, row, OTHER_BYTES, key, words)
        _normal_of(first[start : start + len(here)], words, table, z[start : start + len(here)])


@_compiled
def _normal_of(first, words, table, z):
    """Q^-1 of the uniforms with these first bytes, and other bytes from two of four words each."""
    bits = z.view(np.int64)
    for i in range(len(first)):
        rest = (np.int64(words[4 * i]) << 24) | (np.int64(words[4 * i + 1]) >> 8)
        u = (np.int64(first[i] & 127) << 56) | rest
        z[i] = np.float64(LARGEST - u if first[i] > 127 else u) + 0.5
    for i in range(len(first)):
        c = table[(bits[i] >> 49) - (1022 << 3)]
        bits[i] = ((bits[i] & MANTISSA) << 3) | (1023 << 52)
        t = z[i] - 1
        v = c[0]
        for j in range(1, DEGREE + 1):
            v = v * t + c[j]
        z[i] = -v if first[i] > 127 else v


@_compiled
def _above(row, height, epsilon, place, before, z):
    """Moves the perturbed scores that reach the height to the front, with their classes; how many there are."""
    m = 0
    for i in range(len(place)):
        c = place[i] - before
        if c < len(row):
            v = np.float64(row[c]) + epsilon * z[i]
            z[m], place[m] = v, c
            m += v >= height
    return m


@_compiled
def _kth(v, k):
    """Where the k-th largest is: each candidate is ranked, and bounds those worth ranking after it.

    It costs m log m steps for m numbers, but steps that are vector instructions without branches.
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
