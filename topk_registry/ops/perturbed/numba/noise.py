"""Noise by number: a counter-based generator, and the inverse of the normal distribution."""
# pyright: reportCallIssue=false, reportArgumentType=false
# numba's intrinsics are called without their first parameter

import numpy as np

from topk_registry.ops.cpu.numbers import bits_64, compiled, inlined, number_64
from topk_registry.ops.perturbed.numba.table import DEGREE, STEPS

GROUP = 512  # calls of the generator at a time
AT_ONCE = 16  # calls in one loop
FIRST_BYTES, OTHER_BYTES = 0, 1  # what the generator is called for

# Philox4x32-10: Salmon, Moraes, Dror, Shaw, Parallel random numbers: as easy as 1, 2, 3, SC 2011
MULTIPLY_0, MULTIPLY_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
WEYL_0, WEYL_1 = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
HALF = np.uint64(32)

MANTISSA = np.int64((1 << 52) // STEPS - 1)
LARGEST = np.int64((1 << 63) - 1)


@inlined
def _philox(c0, c1, c2, c3, k0, k1):
    for _ in range(10):
        p0, p1 = MULTIPLY_0 * np.uint64(c0), MULTIPLY_1 * np.uint64(c2)
        c0, c2 = np.uint32(p1 >> HALF) ^ c1 ^ k0, np.uint32(p0 >> HALF) ^ c3 ^ k1
        c1, c3 = np.uint32(p1), np.uint32(p0)
        k0, k1 = np.uint32(k0 + WEYL_0), np.uint32(k1 + WEYL_1)
    return c0, c1, c2, c3


@compiled
def philox_of(calls, row, use, key, words):
    """Four words a call."""
    c2, c3 = np.uint32(row), np.uint32((row >> 32) * 2 + use)
    k0, k1 = key[0], key[1]
    for i in range(len(calls)):
        w0, w1, w2, w3 = _philox(np.uint32(calls[i]), np.uint32(calls[i] >> 32), c2, c3, k0, k1)
        words[4 * i] = w0
        words[4 * i + 1] = w1
        words[4 * i + 2] = w2
        words[4 * i + 3] = w3


@compiled
def normals_of(place, first, row, key, table, z):
    """The normals of these places, from their first bytes and a call of the generator for each. There is room for
    AT_ONCE - 1 more places, whose normals are made with the others': loops of one length have no slow remainder."""
    c2, c3 = np.uint32(row), np.uint32((row >> 32) * 2 + OTHER_BYTES)
    for start in range(0, len(place), AT_ONCE):
        stop = start + AT_ONCE
        uniforms_of(place[start:stop], first[start:stop], c2, c3, key, z[start:stop])
        normal_of(first[start:stop], table, z[start:stop])


@inlined
def uniforms_of(place, first, c2, c3, key, u):
    """2^64 U, or what it is below 2^64 where the first byte is above 127, from that byte and two of four words."""
    for i in range(AT_ONCE):
        call = place[i]
        w0, w1, _, _ = _philox(np.uint32(call), np.uint32(call >> 32), c2, c3, key[0], key[1])
        rest = (np.int64(w0) << 24) | (np.int64(w1) >> 8)
        m = (np.int64(first[i] & 127) << 56) | rest
        u[i] = np.float64(LARGEST - m if first[i] > 127 else m) + 0.5


@inlined
def normal_of(first, table, z):
    """Q^-1 of :func:`uniforms_of`, in place."""
    for i in range(AT_ONCE):
        bits = bits_64(z[i])
        c = table[np.uint64((bits >> 49) - (1022 << 3))]
        t = number_64(((bits & MANTISSA) << 3) | (1023 << 52)) - 1
        v = c[0]
        for j in range(1, DEGREE + 1):
            v = v * t + c[j]
        z[i] = -v if first[i] > 127 else v
