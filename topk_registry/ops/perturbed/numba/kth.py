"""Rows, one at a time: the height, the draws' candidates, their noise, and the k-th largest of each draw."""
# pyright: reportCallIssue=false
# numba's intrinsics are called without their first parameter

import numpy as np

from topk_registry.ops import openmp as team
from topk_registry.ops.perturbed.numba.compiled import compiled
from topk_registry.ops.perturbed.numba.height import find_height, limits
from topk_registry.ops.perturbed.numba.noise import FIRST_BYTES, GROUP, normals_of, philox_of

WHICH_BYTE = np.uint64(0x0001020304050607)  # times 2^(8 j) has j for its highest byte


@compiled
def rows(job, step, s, k, epsilon, key, table, value, index):
    """value [B] and index [B, draws] of the scores s [B, n], of the rows that this thread takes."""
    n, draws = s.shape[1], index.shape[1]
    blocks = (n + 15) // 16
    size = max(GROUP, blocks)
    bits, limit = np.zeros(16 * blocks, np.int32), np.zeros(16 * blocks, np.uint8)
    active, starts = np.empty(blocks, np.int64), np.empty(draws + 1, np.int64)
    calls, words, passed = np.empty(size, np.int64), np.empty(4 * size, np.uint32), np.empty(16 * size, np.uint8)
    some = np.empty(2 * size, np.int64)
    place, first, z = np.empty(16 * size, np.int64), np.empty(16 * size, np.uint8), np.empty(16 * size)
    real = s.dtype.type
    guess, inverse = 0.0, real(1 / epsilon)
    r = team.take(job, step)
    stop = min(r + step, len(s))
    while r < stop:
        row = s[r]
        if _has_nan(row):
            value[r], index[r] = np.nan, 0
        else:
            height = real(find_height(row, k, epsilon, guess, bits))  # rounded once, for all that compare with it
            guess = np.float64(height) if np.isfinite(height) else guess
            total, draw, lower = 0.0, 0, 0.5 * epsilon
            held = limits(row, height, inverse, bits, limit, active)
            while draw < draws:
                stride = min(draws - draw, max(1, GROUP // held))
                for d in range(stride):
                    for a in range(held):
                        calls[d * held + a] = (draw + d) * blocks + active[a]
                philox_of(calls[: stride * held], r, FIRST_BYTES, key, words)
                _passing(calls, words, limit[: 16 * held], stride, passed, some, place, first, starts)
                normals_of(place[: starts[stride]], first, r, key, table, words, z)
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
                height = real(height - lower if lower < 8 * epsilon else -np.inf)
                lower *= 2
                held = limits(row, height, inverse, bits, limit, active)
            value[r] = total / draws
        r += 1
        if r == stop:
            r = team.take(job, step)
            stop = min(r + step, len(s))


@compiled
def _has_nan(row):
    nans = 0
    for i in range(len(row)):
        nans += row[i] != row[i]
    return nans > 0


@compiled
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


@compiled
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


@compiled
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
