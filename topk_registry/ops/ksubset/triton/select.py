# type: ignore
"""Selecting the largest scores of a block, one maximum at a time.

Half-precision scores are selected by a key of 32 bits, the score's in the order of integers above those of the place:
one comparison finds what is left, and a maximum needs no index beside it. Ties are taken in the order of places.
"""

import triton
import triton.language as tl

LAST = tl.constexpr(0xFFFF)


@triton.jit
def keys(s, place):
    """Keys of half-precision scores, which must not be NaN, at places below 2^16."""
    bits = s.to(tl.int16, bitcast=True).to(tl.int32)
    return ((bits ^ ((bits >> 15) & 0x7FFF)) << 16) | (LAST - place)


@triton.jit
def from_keys(key, dtype: tl.constexpr):
    """Scores in single precision, and their places."""
    bits = key >> 16
    s = (bits ^ ((bits >> 15) & 0x7FFF)).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return s, LAST - (key & LAST)


@triton.jit
def largest_below(key, bound):
    """The largest key below ``bound``; -2^31, which is no score's, where there is none."""
    return tl.max(tl.where(key < bound, key, -2147483648), 0)


@triton.jit
def largest(s, place):
    """The largest score and its place, and the scores without it."""
    v, i = tl.max(s, 0, return_indices=True)
    return v, i, tl.where(place == i, float("-inf"), s)
