"""The table of the inverse of the normal distribution that compiled noise reads."""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

STEPS, DEGREE = 8, 5  # pieces of Q^-1 an octave, and the degree of their polynomials: right to 1e-9
SHAPE = 64 * STEPS + 1, DEGREE + 1


@lru_cache(maxsize=1)
def table() -> Tensor:
    """Q^-1(2^-64 m) for m from 1/2 to 2^63, as polynomials in t: m = 2^(e-1) (1 + (step + t) / STEPS)."""
    nodes = (1 - np.cos(np.pi * (np.arange(DEGREE + 1) + 0.5) / (DEGREE + 1))) / 2
    octave, step = np.divmod(np.arange(64 * STEPS + 1), STEPS)
    u = (1 + (step[:, None] + nodes) / STEPS) * 2.0 ** (octave[:, None] - 65)
    z = -torch.special.ndtri(torch.from_numpy(u))
    return torch.linalg.solve(torch.from_numpy(np.vander(nodes)), z.T).T.contiguous()
