"""Noise by number: a counter-based generator, and the inverse of the normal distribution."""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from topk_registry.ops.perturbed.numba.compiled import compiled, inlined

GROUP = 512  # calls of the generator at a time
FIRST_BYTES, OTHER_BYTES = 0, 1  # what the generator is called for

# Philox4x32-10: Salmon, Moraes, Dror, Shaw, Parallel random numbers: as easy as 1, 2, 3, SC 2011
MULTIPLY_0, MULTIPLY_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
WEYL_0, WEYL_1 = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
HALF = np.uint64(32)

STEPS, DEGREE = 8, 5  # pieces of Q^-1 an octave, and the degree of their polynomials: right to 1e-9
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


@lru_cache(maxsize=1)
def table() -> Tensor:
    """Q^-1(2^-64 m) for m from 1/2 to 2^63, as polynomials in t: m = 2^(e-1) (1 + (step + t) / STEPS)."""
    nodes = (1 - np.cos(np.pi * (np.arange(DEGREE + 1) + 0.5) / (DEGREE + 1))) / 2
    octave, step = np.divmod(np.arange(64 * STEPS + 1), STEPS)
    u = (1 + (step[:, None] + nodes) / STEPS) * 2.0 ** (octave[:, None] - 65)
    z = -torch.special.ndtri(torch.from_numpy(u))
    return torch.linalg.solve(torch.from_numpy(np.vander(nodes)), z.T).T.contiguous()


@compiled
def normals_of(place, first, row, key, table, words, z):
    """The normals of these places, from their first bytes and a call of the generator for each."""
    for start in range(0, len(place), GROUP):
        here = place[start : start + GROUP]
        philox_of(here, row, OTHER_BYTES, key, words)
        normal_of(first[start : start + len(here)], words, table, z[start : start + len(here)])


@compiled
def normal_of(first, words, table, z):
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
