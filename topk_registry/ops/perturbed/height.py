"""Find a height that slightly more than k scores of a draw reach, and the noise that each class needs to reach it."""
# pyright: reportCallIssue=false, reportArgumentType=false
# numba's intrinsics are called without their first parameter

import math

import numpy as np

from topk_registry.ops.cpu import select
from topk_registry.ops.cpu.masks import reaching
from topk_registry.ops.cpu.numbers import compiled, inlined, number_32, summing

# Q(x) < 2^-(1 + LINEAR x + SQUARE x^2) for 0 < x < 9.6, by less than 4 percent below 3.3
LINEAR, SQUARE = 1.001, 0.6125
HALF_BITS = np.float32(126 << 23)  # bits of 1/2 in single precision; an octave is 2^23
LINEAR_BITS, SQUARE_BITS = np.float32(LINEAR * 2**23), np.float32(SQUARE * 2**23)
SLOPE_0, SLOPE_1 = np.float32(LINEAR * math.log(2)), np.float32(2 * SQUARE * math.log(2))
HOPELESS = np.int32((127 - 66) << 23)  # bits of 2^-66, below every U
# In units of epsilon. A normal number is at most 9.3, and rounding adds at most 4.
FLOOR, OUT_OF_REACH = 4.0, 20.0  # distances below a bound: of the height; of unreachable scores
FARTHEST = np.float32(12)
# Expected number of scores above the height: target, maximum, and minimum at the start of Newton's method
AIM, MOST, LEAST = 1.2, 1.7, 0.125
TOWARDS_AIM = 0.25  # step size of the guess for the next row, assuming a slope of 1 of the logarithm
BYTES = np.float32(256.1)  # 256 plus a margin for rounding


@inlined
def _few(k):
    """Return the expected number of scores above the height to aim at.

    With this number, one draw in a hundred has fewer than k scores and is computed again. Each further score costs a
    normal number per draw.
    """
    return k + 1.5 * math.sqrt(k) + 2


@compiled
def find_height(row, k, epsilon, guess, bits):
    """Find a height that k scores of nearly every draw reach, and not many more; -inf if there is none.

    Returns the height, a guess for a similar row, the smallest tail probability of a score as bits, and whether any
    score is NaN. ``bits`` gets the tail probabilities.
    """
    few, real = _few(k), row.dtype.type
    low, high, height, reach, inverse = -np.inf, np.inf, np.float64(real(guess)), epsilon, real(1 / epsilon)
    last, lowest, count = height, np.int32(0), few
    if few >= len(row):
        _, lowest, broken = tails(row, real(height), inverse, bits)
        return -np.inf, -np.inf, lowest, broken
    for trial in range(24):
        count, lowest, broken = tails(row, real(height), inverse, bits)
        last = height
        if broken:
            return height, height, lowest, True
        if count < few:
            high = height
        else:
            low = height
            if count <= MOST * few:
                break
        slope = _slope(row, real(height), inverse, bits)
        newton = height + epsilon * math.log(count / (AIM * few)) * count / max(slope, 1e-3)
        if low < newton < high and trial % 4 < 3 and (np.isfinite(low) or count > LEAST * few):
            height = newton
        elif np.isfinite(low) and np.isfinite(high):
            height = (low + high) / 2
        else:
            height = max(newton, height + reach) if count >= few else min(newton, height - reach)
            reach *= 8
        height = np.float64(real(height))  # rounded once, so that all comparisons use the same value
    if low != last and low != -np.inf:
        count, lowest, _ = tails(row, real(low), inverse, bits)
    return low, low + TOWARDS_AIM * epsilon * math.log(count / (AIM * few)), lowest, False


@summing
def tails(row, height, inverse, bits):
    """Return the expected number of scores above the height, slightly overestimated.

    The other results are the smallest of the bits, and whether any score is NaN.
    """
    count, lowest, nans = np.float32(0), np.int32(0x7FFFFFFF), np.float32(0)
    for i in range(len(row)):
        x = np.float32((height - row[i]) * inverse)
        b = tail_bits(x)
        bits[i] = b
        count += number_32(b) if x > np.float32(0) else np.float32(1)
        lowest = b if b < lowest else lowest
        nans += np.float32(row[i] != row[i])
    return np.float64(count), lowest, nans > np.float32(0)


@summing
def _slope(row, height, inverse, bits):
    """Return the derivative of the number of :func:`tails` with respect to the height, with opposite sign."""
    slope = np.float32(0)
    for i in range(len(row)):
        x = np.float32((height - row[i]) * inverse)
        x = x if x < FARTHEST else FARTHEST
        slope += number_32(bits[i]) * (SLOPE_0 + SLOPE_1 * x) if x > np.float32(0) else np.float32(0)
    return np.float64(slope)


@inlined
def tail_bits(x):
    """Return the bits of a float slightly above Q(max(x, 0)): 2^-(1 + ...), linear within each octave."""
    x = np.float32(x)
    x = x if x > np.float32(0) else np.float32(0)
    x = x if x < FARTHEST else FARTHEST
    return np.int32(HALF_BITS - x * (LINEAR_BITS + SQUARE_BITS * x))


@compiled
def limits(bits, limit):
    """Write the largest first byte of U with which each class can reach the height."""
    for i in range(len(bits)):
        q = number_32(bits[i])
        limit[i] = np.uint8(np.int32(BYTES * q) if q < np.float32(0.5) else np.int32(255))


@compiled
def in_reach(row, k, epsilon, maxima, active, packed):
    """Pack the blocks of 16 classes in which any class can reach a height near that of k scores.

    ``active`` gets the block indices and ``packed`` their scores. Returns the number of blocks, 0 if the row is too
    short, and a score near the height.
    """
    n, blocks, held = len(row), len(active), 0
    if len(maxima) == 0:
        return 0, 0.0
    select.maxima_of_lines(row, maxima)
    near = np.float64(select.reached_by(maxima, np.int64(_few(k)) + 1))
    if not np.isfinite(near):
        return 0, 0.0
    bound = row.dtype.type(near - OUT_OF_REACH * epsilon)
    for b in range(n // 16):
        active[held] = b
        held += reaching(row, 16 * b, bound) != 0
    for a in range(held):
        start = 16 * active[a]
        for i in range(16):
            packed[16 * a + i] = row[start + i]
    if n % 16:
        active[held], start = blocks - 1, 16 * (blocks - 1)
        for i in range(16):
            packed[16 * held + i] = row[start + i] if start + i < n else row.dtype.type(-np.inf)
        held += 1
    return held, near


@compiled
def lines(n, k):
    """Return the number of lines that :func:`in_reach` searches for maxima, or 0 for short rows."""
    count = 32
    while count < 8 * _few(k):
        count *= 2
    return count if 2 * count <= n else 0
