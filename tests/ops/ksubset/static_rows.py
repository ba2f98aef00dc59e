"""Rows on which a careless exported operator fails, and how near its marginals must be."""

import numpy as np
import torch
from torch import Tensor

from tests.ops.ksubset.scores import KINDS, scores

RTOL = 1e-5
SMALLEST = 1e-35  # smaller marginals come from denormal odds


def rows(n: int, k: int) -> dict[str, Tensor]:
    normal, place = scores("gaussian", n, rows=1)[0], torch.arange(n)
    return {
        **{kind: scores(kind, n, rows=1)[0] for kind in KINDS},
        "k ahead by 100": 100.0 * (place < k) + normal,
        "k + 1 ahead by 100": 100.0 * (place <= k),
        "one behind by 100": -100.0 * (place == n // 2),
        "shifted by 1e3": 5 * normal + 1e3,
        "shifted by -1e3": 5 * normal - 1e3,
        "from 30 to -30": torch.linspace(30, -30, n),
    }


def assert_near(got: np.ndarray, wanted: np.ndarray, name: str = "") -> None:
    small = wanted < SMALLEST
    np.testing.assert_allclose(got[~small], wanted[~small], rtol=RTOL, atol=0, err_msg=name)
    assert (got[small] <= 2 * SMALLEST).all(), name
