"""Compiled state and gradient of a chunk of classes, for the functions of the same names in torch/state.py.

A row's odds are made in a buffer of its length, which stays in the cache; the polynomials, which are few, are left to
torch operations.
"""
# pyright: reportCallIssue=false, reportArgumentType=false
# numba's intrinsics are called without their first parameter

from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from topk_registry.ops.cpu import blocks, select
from topk_registry.ops.cpu import openmp as team
from topk_registry.ops.cpu.numbers import compiled
from topk_registry.ops.ksubset.numba import backend as cpu
from topk_registry.ops.ksubset.numba import rows
from topk_registry.ops.ksubset.torch import state as streaming
from topk_registry.ops.ksubset.torch.rows import Coefficients, State


def summarise(s: Tensor, k: int, theta: float, first_class: int = 0, out: Tensor | None = None) -> State:
    """The state of classes first_class, first_class + 1, ... from their scores s [B, n]; ``out`` is not needed here."""
    B, n = s.shape
    top = s.new_empty(B, min(2 * k + 1, n))
    classes, P = torch.empty_like(top, dtype=torch.int64), torch.empty(B, k, dtype=torch.float64)
    cpu.share(_summarise(s.dtype), s, k, theta, top, classes, P)
    return State(top, classes.add_(first_class), P.T)


extend = partial(streaming.extend, summarise=summarise)


def gradient(
    s: Tensor, label: Tensor, f: Coefficients, theta: float, g: Tensor, first_class: int = 0, flat: Tensor | None = None
) -> Tensor:
    """g [B] times the gradient of the label's margin to the scores of a chunk [B, m], labels [B] among all classes.

    It is written into the first numbers of ``flat``, which may be those of s.
    """
    out = torch.empty_like(s) if flat is None else flat[:-1].view(s.shape)
    classes = torch.cat((f.classes, label[:, None]), 1) - first_class
    values = torch.cat((f.in_top, torch.ones_like(f.a[:, None])), 1).mul_(g[:, None])
    width, a, c = torch.tensor([classes.shape[1]]), f.a.contiguous(), f.c.T.contiguous()
    cpu.share(_gradient(s.dtype), s, len(f.c) - 1, theta, width, classes, values, a, f.scale, g.contiguous(), c, out)
    return out


@compiled
def _state_rows(s, k, theta, top, where, P):
    (B, n), T, real = s.shape, top.shape[1], s.dtype.type
    inverse, floor = rows.limits(s, theta)
    room, piece, w = select.room(n, T, s.dtype), np.empty(blocks.PIECE, s.dtype), np.empty(n, s.dtype)
    for r in range(B):
        if not select.largest(s[r], -1, top[r], where[r], room):  # too many are NaN
            top[r], where[r], P[r] = np.nan, 0, np.nan
            continue
        a = real(np.finfo(s.dtype).min)  # as torch_path.reference
        rows.odds(s[r], max(a, top[r, k - 1]) if k <= T else a, inverse, floor, w)
        for j in range(T):
            w[where[r, j]] = 0
        rows.power_sums(w, P[r], piece)


@compiled
def _gradient_rows(s, theta, classes, values, a, scale, g, c, out):
    B, n = s.shape
    inverse, floor = rows.limits(s, theta)
    piece, w, k = np.empty(blocks.PIECE, s.dtype), np.empty(n, s.dtype), c.shape[1] - 1
    padded = rows.coefficients(k, s.dtype)
    for r in range(B):
        rows.odds(s[r], a[r], inverse, floor, w)
        padded[blocks.FRONT :] = c[r]
        rows.label_gradient(w, padded, scale[r], g[r], k, piece)
        out[r] = w
        for j in range(classes.shape[1]):
            if 0 <= classes[r, j] < n:
                out[r, classes[r, j]] = values[r, j]


@lru_cache(maxsize=2)
def _summarise(dtype: torch.dtype) -> team.Body:
    real, edition = cpu.real_of(dtype), team.edition()

    @team.compiled
    def body(job):
        assert edition  # part of the cache's key, see backend.py
        B, n, k, step, theta, address = cpu.operands(job, 4)
        T = min(2 * k + 1, n)
        s, top = cpu.array(address[0], (B, n), real), cpu.array(address[1], (B, T), real)
        where, P = cpu.array(address[2], (B, T), np.int64), cpu.array(address[3], (B, k), np.float64)
        for i, j in team.spans(job, step, B):
            _state_rows(s[i:j], k, theta, top[i:j], where[i:j], P[i:j])

    return body


@lru_cache(maxsize=2)
def _gradient(dtype: torch.dtype) -> team.Body:
    real, edition = cpu.real_of(dtype), team.edition()

    @team.compiled
    def body(job):
        assert edition  # part of the cache's key, see backend.py
        B, n, k, step, theta, address = cpu.operands(job, 9)
        s, out = cpu.array(address[0], (B, n), real), cpu.array(address[8], (B, n), real)
        width = cpu.array(address[1], 1, np.int64)[0]
        classes, values = cpu.array(address[2], (B, width), np.int64), cpu.array(address[3], (B, width), real)
        a, scale, g = cpu.array(address[4], B, real), cpu.array(address[5], B, real), cpu.array(address[6], B, real)
        c = cpu.array(address[7], (B, k + 1), real)
        for i, j in team.spans(job, step, B):
            _gradient_rows(s[i:j], theta, classes[i:j], values[i:j], a[i:j], scale[i:j], g[i:j], c[i:j], out[i:j])

    return body
