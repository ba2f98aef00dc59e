"""Compiled state and gradient of a chunk of classes, for the functions of the same names in torch/state.py.

A row's odds are made in a buffer of its length, which stays in the cache; the polynomials, which are few, are left to
torch operations.
"""

from functools import partial

import torch
from torch import Tensor

from topk_registry.ops.ksubset.numba.backend import run_on_rows
from topk_registry.ops.ksubset.torch import state
from topk_registry.ops.ksubset.torch.rows import Coefficients, State


def summarise(s: Tensor, k: int, theta: float, first_class: int = 0, out: Tensor | None = None) -> State:
    """The state of classes first_class, first_class + 1, ... from their scores s [B, n]; ``out`` is not needed here."""
    B, n = s.shape
    top = s.new_empty(B, min(2 * k + 1, n))
    classes, P = torch.empty_like(top, dtype=torch.int64), s.new_empty(B, k, dtype=torch.float64)
    run_on_rows("chunk_state", s, k, theta, top, classes, P)
    return State(top, classes.add_(first_class), P.T)


extend = partial(state.extend, summarise=summarise)


def gradient(
    s: Tensor, label: Tensor, f: Coefficients, theta: float, g: Tensor, first_class: int = 0, flat: Tensor | None = None
) -> Tensor:
    """g [B] times the gradient of the label's margin to the scores of a chunk [B, m], labels [B] among all classes.

    It is written into the first numbers of ``flat``, which may be those of s.
    """
    out = torch.empty_like(s) if flat is None else flat[:-1].view(s.shape)
    classes = torch.cat((f.classes, label[:, None]), 1) - first_class
    values = torch.cat((f.in_top, torch.ones_like(f.a[:, None])), 1).mul_(g[:, None])
    width, a, c = classes.new_tensor([classes.shape[1]]), f.a.contiguous(), f.c.T.contiguous()
    run_on_rows("chunk_gradient", s, len(f.c) - 1, theta, width, classes, values, a, f.scale, g.contiguous(), c, out)
    return out
