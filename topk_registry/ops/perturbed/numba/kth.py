"""One row at a time: the height, the draws' candidates, their noise, and the k-th largest of each draw."""
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
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
    space, guess = room(s.shape[1], index.shape[1]), 0.0
    for start, stop in team.spans(job, step, len(s)):
        for r in range(start, stop):
            value[r], guess = of_row(s[r], r, k, epsilon, key, table, index[r], guess, space)


@compiled
def room(n, draws):
    """Scratch memory of :func:`of_row`."""
    blocks = (n + 15) // 16
    size = min(draws * blocks, max(GROUP, blocks))  # calls of the generator at a time
    bits, active, calls = np.zeros(16 * blocks, np.int32), np.empty(blocks, np.int64), np.empty((3, size), np.int64)
    words, places = np.empty(4 * max(size, GROUP), np.uint32), np.empty((2, 16 * size), np.int64)
    return bits, active, calls, words, places, np.empty((3, 16 * size), np.uint8)


@compiled
def of_row(row, r, k, epsilon, key, table, index, guess, space):
    """The mean over the draws of the k-th largest perturbed score, 2 k <= n + 1, and a guess of the next row's height.

    Args:
        row: scores [n].
        r: the row's place in the batch; with the key, the draw and the class it decides on the noise.
        index: receives the class that was k-th at each draw [draws].
        guess: of the height that k scores of a draw reach. It decides on the time only.
        space: from :func:`room`.
    """
    bits, active, calls, words, places, of_bytes = space
    draws, blocks, real = len(index), len(active), row.dtype.type
    limit, passed, first = of_bytes[0], of_bytes[1], of_bytes[2]
    calls, some, place, z = calls[0], calls[1:].ravel(), places[0], places[1].view(np.float64)
    if _has_nan(row):
        index[:] = 0
        return np.nan, guess
    inverse = real(1 / epsilon)
    height = real(find_height(row, k, epsilon, guess, bits))  # rounded once, for all that compare with it
    guess = np.float64(height) if np.isfinite(height) else guess
    total, draw, lower = 0.0, 0, 0.5 * epsilon
    held = limits(row, height, inverse, bits, limit, active)
    starts = np.empty(draws + 1, np.int64)
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
            index[draw] = place[low + j]
            draw += 1
        else:
            continue
        height = real(height - lower if lower < 8 * epsilon else -np.inf)
        lower *= 2
        held = limits(row, height, inverse, bits, limit, active)
    return total / draws, guess


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
