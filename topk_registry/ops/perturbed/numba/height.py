"""A height that hardly more than k scores of a draw reach, and the noise each class needs to reach it."""

import math

import numpy as np

from topk_registry.ops.perturbed.numba.compiled import compiled, inlined, summing

PIECE = 512  # scores to work on at a time

# Q(x) < 2^-(1 + LINEAR x + SQUARE x^2) for 0 < x < 9.6, by less than 4 percent below 3.3
LINEAR, SQUARE = 1.001, 0.6125
HALF_BITS = np.float32(126 << 23)  # of 1/2 in single precision; an octave is 2^23
LINEAR_BITS, SQUARE_BITS = np.float32(LINEAR * 2**23), np.float32(SQUARE * 2**23)
SLOPE_0, SLOPE_1 = np.float32(LINEAR * math.log(2)), np.float32(2 * SQUARE * math.log(2))
HOPELESS = np.int32((127 - 66) << 23)  # the bits of 2^-66: no U is as small
FARTHEST = np.float32(12)
BYTES = np.float32(256.1)  # the tenth is for rounding


@compiled
def find_height(row, k, epsilon, guess, bits):
    """A height that k scores of nearly every draw reach, and not many more; -inf if none is found."""
    # one draw in a hundred has fewer than k and is looked at again; each score more costs a normal in every draw
    few = k + 1.5 * math.sqrt(k) + 2
    if few >= len(row):
        return -np.inf
    low, high, height, reach = -np.inf, np.inf, guess, epsilon
    for trial in range(24):
        count, slope = _expected(row, row.dtype.type(height), row.dtype.type(1 / epsilon), bits)
        if count < few:
            high = height
        else:
            low = height
            if count <= 1.5 * few:
                break
        newton = height + epsilon * math.log(count / (1.2 * few)) * count / max(slope, 1e-3)
        if low < newton < high and trial % 4 < 3 and np.isfinite(low):
            height = newton
        elif np.isfinite(low) and np.isfinite(high):
            height = (low + high) / 2
        else:
            height = max(newton, height + reach) if count >= few else min(newton, height - reach)
            reach *= 8
    return low


@summing
def _expected(row, height, inverse, bits):
    """How many scores may be expected above the height, a little overrated, and how fast the number falls with it."""
    count, slope = np.float32(0), np.float32(0)
    for start in range(0, len(row), PIECE):
        scores = row[start : start + PIECE]
        piece, q = bits[: len(scores)], bits[: len(scores)].view(np.float32)
        for i in range(len(scores)):
            piece[i] = tail_bits((height - scores[i]) * inverse)
        for i in range(len(scores)):
            x = min(np.float32((height - scores[i]) * inverse), FARTHEST)
            count += q[i] if x > np.float32(0) else np.float32(1)
            slope += q[i] * (SLOPE_0 + SLOPE_1 * x) if x > np.float32(0) else np.float32(0)
    return np.float64(count), np.float64(slope)


@inlined
def tail_bits(x):
    """The bits of a number in single precision a little above Q(max(x, 0)): 2^-(1 + ...), linear within each octave."""
    x = min(max(np.float32(x), np.float32(0)), FARTHEST)
    return np.int32(HALF_BITS - x * (LINEAR_BITS + SQUARE_BITS * x))


@compiled
def limits(row, height, inverse, bits, limit, active):
    """The largest first byte of U with which a class can reach the height, and the blocks of 16 in which any can."""
    if height == -np.inf:
        limit[:] = 255
        active[:] = np.arange(len(active))
        return len(active)
    lowest = np.int32(0x7FFFFFFF)
    for i in range(len(row)):
        bits[i] = tail_bits((height - row[i]) * inverse)
        lowest = min(lowest, bits[i])
    q = bits.view(np.float32)
    for i in range(len(row)):
        limit[i] = np.uint8(np.int32(BYTES * q[i]) if row[i] < height else np.int32(255))
    if lowest > HOPELESS:
        active[:] = np.arange(len(active))
        return len(active)
    held, eight = 0, limit.view(np.uint64)
    for b in range(len(active)):
        least = HOPELESS
        for i in range(16 * b, 16 * b + 16):
            least = max(least, bits[i])
        active[held], eight[2 * held], eight[2 * held + 1] = b, eight[2 * b], eight[2 * b + 1]
        held += least > HOPELESS
    return held
