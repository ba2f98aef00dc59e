"""Normal noise as a function of the seed, the row, the draw and the class.

Let Q(x) be the probability that standard normal noise exceeds x. For each class in each draw, the generator gives a
uniform 64-bit number u, and the noise is Q^-1(u / 2^64). The first byte of u gives an upper bound on the noise. One
call of the generator gives the first bytes of 16 classes, or the other 56 bits of one class.

Reference: Salmon, Moraes, Dror, Shaw, *Parallel random numbers: as easy as 1, 2, 3*, SC 2011 (Philox4x32-7).
"""
# pyright: reportCallIssue=false, reportArgumentType=false
# numba's intrinsics are called without their first parameter

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from topk_registry.ops.cpu.numbers import bits_64, compiled, inlined, number_64

FIRST_BYTES, OTHER_BYTES = np.uint64(0), np.uint64(1)  # what a call of the generator is used for
LOW, HIGH = np.uint64((1 << 32) - 1), np.uint64(32)  # mask of the lower 32 bits of a word, shift of the upper 32 bits
MULTIPLY_0, MULTIPLY_1, WEYL_0, WEYL_1 = map(np.uint64, (0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85))

ROUNDS = 7  # Philox with fewer rounds fails the statistical test BigCrush, according to the paper

STEPS, DEGREE = 8, 5  # pieces of Q^-1 per octave, and degree of their polynomials, for an error of 1e-9
TABLE = 64 * STEPS + 1, DEGREE + 1  # shape of the table of Q^-1
MANTISSA = np.int64((1 << 52) // STEPS - 1)


@inlined
def philox(call, row, use, key_0, key_1):
    """Return two 64-bit words of random bits, a function of the arguments. ``use`` is FIRST_BYTES or OTHER_BYTES."""
    # the upper 32 bits of c0 to c3 and of the keys are ignored
    c0, c1, c2, c3 = call, call >> HIGH, row, ((row >> HIGH) << np.uint64(1)) | use
    for _ in range(ROUNDS):
        p, q = MULTIPLY_0 * (c0 & LOW), MULTIPLY_1 * (c2 & LOW)
        c0, c1, c2, c3 = (q >> HIGH) ^ c1 ^ key_0, q, (p >> HIGH) ^ c3 ^ key_1, p
        key_0, key_1 = key_0 + WEYL_0, key_1 + WEYL_1
    return (c0 & LOW) | (c1 << HIGH), (c2 & LOW) | (c3 << HIGH)


@compiled
def first_bytes(call, row, key, words):
    """Write the first byte of the random number of each class to ``words``.

    The generator is called with the numbers ``call``, ``call`` + 1, ... Each call gives the first bytes of 16 classes.
    """
    half, key_0, key_1 = len(words) // 2, np.uint64(key[0]), np.uint64(key[1])
    for i in range(half):
        words[i], words[half + i] = philox(call + np.uint64(i), row, FIRST_BYTES, key_0, key_1)


@compiled
def other_bytes(call, row, key, u):
    """Set the last 56 bits of each number ``u[j]``, which are 0, to the bits that the generator gives for call[j]."""
    key_0, key_1 = np.uint64(key[0]), np.uint64(key[1])
    for j in range(len(u)):
        word, _ = philox(call[j], row, OTHER_BYTES, key_0, key_1)
        u[j] |= ((word & LOW) << np.uint64(24)) | (word >> np.uint64(40))


@inlined
def normal(u, table):
    """Return the x that standard normal noise exceeds with probability 2^-64 (u + 1/2), for a 64-bit integer u."""
    negative = u >> np.uint64(63)
    bits = bits_64(np.float64(np.int64(u ^ (np.uint64(0) - negative))) + 0.5)
    c = table[np.uint64((bits >> 49) - (1022 << 3))]
    t = number_64(((bits & MANTISSA) << 3) | (1023 << 52)) - 1
    z = c[0]
    for j in range(1, DEGREE + 1):
        z = z * t + c[j]
    return -z if negative else z


@lru_cache(maxsize=1)
def table() -> Tensor:
    """Return the coefficients [intervals, DEGREE + 1] of the polynomials in :func:`normal`, one row per interval."""
    # Row STEPS e + step is Q^-1(2^-64 m) as a polynomial in t from 0 to 1, where m = 2^(e-1) (1 + (step + t) / STEPS).
    nodes = (1 - np.cos(np.pi * (np.arange(DEGREE + 1) + 0.5) / (DEGREE + 1))) / 2
    octave, step = np.divmod(np.arange(64 * STEPS + 1), STEPS)
    u = (1 + (step[:, None] + nodes) / STEPS) * 2.0 ** (octave[:, None] - 65)
    z = -torch.special.ndtri(torch.from_numpy(u))
    return torch.linalg.solve(torch.from_numpy(np.vander(nodes)), z.T).T.contiguous()
