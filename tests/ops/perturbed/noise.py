"""The noise of the kernels, number by number: Philox4x32-7 and the inverse of the normal distribution, in numpy."""

from collections.abc import Sequence

import numpy as np
import torch

MASK, HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox(counter: Sequence[np.ndarray], key: Sequence[int]) -> list[np.ndarray]:
    """The four words of four counters and two keys, after Salmon, Moraes, Dror and Shaw (2011)."""
    (c0, c1, c2, c3), (k0, k1) = (words.astype(np.uint64) for words in counter), map(int, key)
    for _ in range(7):
        p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = p1 >> HALF ^ c1 ^ np.uint64(k0), p1 & MASK, p0 >> HALF ^ c3 ^ np.uint64(k1), p0 & MASK
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def uniforms(seed: int, draws: int, rows: int, n: int) -> np.ndarray:
    """64-bit integers [draws, rows, n]: the first byte from a call for 16 classes, the others from a call for each.

    The classes of a draw are padded to a multiple of 256. A call is for eight in the first half and eight in the other.
    """
    key = seed & 0xFFFFFFFF, seed >> 32
    size = -(-n // 256) * 256
    draw, row, c = np.ogrid[:draws, :rows, :size]
    words = philox(_counter(draw * (size // 16) + c % (size // 2) // 8, row, 0), key)
    word = np.select([c // 4 % 2 + 2 * (c // (size // 2)) == i for i in range(4)], words)
    byte = word >> (c % 4 * 8).astype(np.uint64) & np.uint64(255)
    rest = philox(_counter(draw * size + c, row, 1), key)
    return (byte << np.uint64(56) | rest[0] << np.uint64(24) | rest[1] >> np.uint64(8))[..., :n]


def _counter(place: np.ndarray, row: np.ndarray, use: int) -> list[np.ndarray]:
    return np.broadcast_arrays(place & 0xFFFFFFFF, place >> 32, row & 0xFFFFFFFF, (row >> 32) * 2 + use)


def normals(u: np.ndarray) -> np.ndarray:
    """z with upper tail probability 2^-64 (u + 1/2)."""
    negative = u >> np.uint64(63) > 0
    m = np.where(negative, ~u, u).astype(np.float64) + 0.5
    z = -torch.special.ndtri(torch.from_numpy(m * 2.0**-64)).numpy()
    return np.where(negative, -z, z)


def noise(seed: int, draws: int, rows: int, n: int) -> torch.Tensor:
    """[draws, rows, n], double precision."""
    return torch.from_numpy(normals(uniforms(seed, draws, rows, n)))
