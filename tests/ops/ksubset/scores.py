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
