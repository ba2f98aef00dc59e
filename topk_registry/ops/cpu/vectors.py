"""Passes over the scores of one row that become vector instructions."""
# pyright: reportCallIssue=false, reportArgumentType=false
# numba's intrinsics are called without their first parameter

import numpy as np

from topk_registry.ops.cpu.functions import BLOCK, compiled, exp, log, number_of, total_of
from topk_registry.ops.cpu.jobs import address_of, array

__all__ = [
    "exponentials",
    "largest_of",
    "nothing",
    "place_of_largest",
    "probabilities_of",
    "scale_by",
    "total_of",
]


@compiled
def largest_of(x):
    """The largest number, -inf of none. NaN counts as the largest, unless its sign is negative.

    Read as an integer, a number keeps its order once the bits of the negative ones are turned over; integers, unlike
    numbers that may be NaN, are compared by vector instructions.
    """
    if x.itemsize == 4:
        bits, best = array(address_of(x), len(x), np.int32), np.int32(-0x7F800001)
        for i in range(len(bits)):
            key = np.int32(bits[i] ^ ((bits[i] >> np.int32(31)) & np.int32(0x7FFFFFFF)))
            best = key if key > best else best
        return x.dtype.type(number_of(np.int32(best ^ ((best >> np.int32(31)) & np.int32(0x7FFFFFFF)))))
    wide, most = array(address_of(x), len(x), np.int64), np.int64(-0x7FF0000000000001)
    for i in range(len(wide)):
        key = wide[i] ^ ((wide[i] >> 63) & 0x7FFFFFFFFFFFFFFF)
        most = key if key > most else most
    return x.dtype.type(number_of(most ^ ((most >> 63) & 0x7FFFFFFFFFFFFFFF)))  # one type whichever branch


@compiled
def place_of_largest(x):
    """The first place of the largest number; 0 where that is NaN."""
    best, at = largest_of(x[:BLOCK]), 0
    for start in range(BLOCK, len(x), BLOCK):
        found = largest_of(x[start : start + BLOCK])
        if found > best:
            best, at = found, start
    for i in range(at, min(at + BLOCK, len(x))):
        if x[i] == best:
            return i
    return 0


@compiled
def exponentials(x, a, scale, out):
    """out = exp(scale (x - a)), and their sum."""
    total = 0.0
    for start in range(0, len(x), BLOCK):
        row, found = x[start : start + BLOCK], out[start : start + BLOCK]
        for i in range(len(row)):
            found[i] = exp((row[i] - a) * scale)
        total += total_of(found)
    return total


@compiled
def scale_by(x, factor):
    for i in range(len(x)):
        x[i] *= factor


@compiled
def nothing(g):
    """NaN as the loss, and as every entry of the gradient."""
    g[:] = np.nan
    return np.nan


@compiled
def probabilities_of(log_odds):
    """log p, log(1 - p), p and 1 - p of log-odds, none of them by a difference that cancels."""
    e = exp(-abs(log_odds))
    rest = log(1.0 + e) if e > 1e-9 else e
    above = log_odds > 0
    large, small = 1.0 / (1.0 + e), e / (1.0 + e)
    log_large, log_small = -rest, -abs(log_odds) - rest
    if above:
        return log_large, log_small, large, small
    return log_small, log_large, small, large
