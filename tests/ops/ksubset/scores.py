"""The kinds of score rows on which the operator's accuracy is promised."""

import torch
from torch import Tensor

KINDS = ("gaussian", "flat", "tied", "outlier", "block", "wide", "shifted")


def scores(kind: str, n: int, rows: int = 2) -> Tensor:
    """Rows [rows, n] in single precision, the same for the same arguments."""
    g = torch.Generator().manual_seed(1000 * n + KINDS.index(kind))
    s = torch.randn(rows, n, generator=g)
    if kind == "flat":
        s = s[:, :1].expand(rows, n).clone()
    elif kind == "tied":
        s = torch.randint(0, 3, (rows, n), generator=g).float()
    elif kind == "outlier":
        s[:, n // 2] += 100.0
    elif kind == "block":
        s[:, : max(1, n // 4)] += 30.0
    elif kind == "wide":
        s = torch.rand(rows, n, generator=g) * 1e4
    elif kind == "shifted":
        s += 5000.0
    return s


NEARLY_FLAT = ("gaussian", "tied at 3 values", "2k nearly equal leaders")


def nearly_flat(kind: str, n: int, k: int, side: float) -> Tensor:
    """A row [1, n] whose largest softmax is ``side`` / (2k): rows with less than 1 / (2k) need no top group."""
    g = torch.Generator().manual_seed(1000 * n + k)
    s = torch.randn(1, n, generator=g, dtype=torch.float64)
    if kind == "tied at 3 values":
        s = torch.randint(0, 3, (1, n), generator=g).double()
    elif kind == "2k nearly equal leaders":
        s[:, : 2 * k] = 20.0 + 1e-3 * s[:, : 2 * k]
    wanted = side / (2 * k)
    if (s - s.amax() > -1e-9).sum() > 1 / wanted:  # too many are tied: one of them leads
        s[0, int(s.argmax())] += 1.0
    low, high = 0.0, 1e3
    for _ in range(100):
        scale = (low + high) / 2
        low, high = (scale, high) if torch.softmax(s * scale, -1).max() < wanted else (low, scale)
    return (s * low).float()
