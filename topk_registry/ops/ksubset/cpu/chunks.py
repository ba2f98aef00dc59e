"""The functions of streaming.py for a chunk of classes, compiled: its state, and its gradient.

A row's odds are made in a buffer of its length, which stays in the cache; the polynomials, which are few, are left to
torch operations.
"""
# pyright: reportCallIssue=false, reportArgumentType=false
# numba's intrinsics are called without their first parameter

import math
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numba import carray, cfunc
from torch import Tensor

from topk_registry.ops import team
from topk_registry.ops.ksubset import cpu
from topk_registry.ops.ksubset.cpu import rows
from topk_registry.ops.ksubset.cpu.compiled import compiled
from topk_registry.ops.ksubset.torch_path import Coefficients, State


def summarise(s: Tensor, k: int, theta: float, first_class: int = 0, out: Tensor | None = None) -> State:
    """The state of classes first_class, first_class + 1, ... from their scores s [B, n]; ``out`` is not needed here."""
    B, n = s.shape
    top = s.new_empty(B, min(2 * k + 1, n))
    classes, P = torch.empty_like(top, dtype=torch.int64), torch.empty(B, k, dtype=torch.float64)
    cpu._share(_summarise(s.dtype), s, k, theta, top, classes, P)
    return State(top, classes.add_(first_class), P.T)


def gradient(
    s: Tensor, label: Tensor, f: Coefficients, theta: float, first_class: int = 0, flat: Tensor | None = None
) -> Tensor:
    """Gradient of the label's margin to the scores of a chunk: [B, m], labels [B] among all classes -> [B, m].

    It is written into the first numbers of ``flat``, which may be those of s.
    """
    out = torch.empty_like(s) if flat is None else flat[:-1].view(s.shape)
    classes = torch.cat((f.classes, label[:, None]), 1) - first_class
    values = torch.cat((f.in_top, torch.ones_like(f.a[:, None])), 1)
    width = torch.tensor([classes.shape[1]])
    kernel, k = _gradient(s.dtype), len(f.c) - 1
    cpu._share(kernel, s, k, theta, width, classes, values, f.a.contiguous(), f.scale, f.c.T.contiguous(), out)
    return out


@compiled
def _state_rows(s, k, theta, top, where, P):
    (B, n), T, real = s.shape, top.shape[1], s.dtype.type
    inverse, floor = real(1 / theta), real(0.4 * math.log(np.finfo(s.dtype).tiny))
    room, piece, w = rows.room(n, T, s.dtype), np.empty(rows.PIECE, s.dtype), np.empty(n, s.dtype)
    for r in range(B):
        if not rows.largest(s[r], -1, top[r], where[r], room):  # too many are NaN
            top[r], where[r], P[r] = np.nan, 0, np.nan
            continue
        a = real(np.finfo(s.dtype).min)  # as torch_path.reference
        rows.odds(s[r], max(a, top[r, k - 1]) if k <= T else a, inverse, floor, w)
        for j in range(T):
            w[where[r, j]] = 0
        rows.power_sums(w, P[r], piece)


@compiled
def _gradient_rows(s, theta, classes, values, a, scale, c, out):
    (B, n), real = s.shape, s.dtype.type
    inverse, floor = real(1 / theta), real(0.4 * math.log(np.finfo(s.dtype).tiny))
    piece, w = np.empty(rows.PIECE, s.dtype), np.empty(n, s.dtype)
    for r in range(B):
        rows.odds(s[r], a[r], inverse, floor, w)
        rows.label_gradient(w, c[r], scale[r], piece)
        out[r] = w
        for j in range(classes.shape[1]):
            if 0 <= classes[r, j] < n:
                out[r, classes[r, j]] = values[r, j]


@lru_cache(maxsize=2)
def _summarise(dtype: torch.dtype) -> team.Body:
    real, edition = cpu._real(dtype), team.edition(Path(__file__).parent)

    @cfunc(team.signature, cache=True)
    def body(job):
        assert edition  # part of the cache's key, see cpu/__init__.py
        _, B, n, k, step = carray(job, 5, np.int64)
        theta, address, T = carray(job, 6, np.float64)[5], carray(job, 10, np.int64)[6:], min(2 * k + 1, n)
        s, top = carray(team.pointer(address[0]), (B, n), real), carray(team.pointer(address[1]), (B, T), real)
        where = carray(team.pointer(address[2]), (B, T), np.int64)
        P = carray(team.pointer(address[3]), (B, k), np.float64)
        start = team.take(job, step)
        while start < B:
            stop = min(start + step, B)
            _state_rows(s[start:stop], k, theta, top[start:stop], where[start:stop], P[start:stop])
            start = team.take(job, step)

    return body.ctypes


@lru_cache(maxsize=2)
def _gradient(dtype: torch.dtype) -> team.Body:
    real, edition = cpu._real(dtype), team.edition(Path(__file__).parent)

    @cfunc(team.signature, cache=True)
    def body(job):
        assert edition  # part of the cache's key, see cpu/__init__.py
        _, B, n, k, step = carray(job, 5, np.int64)
        theta, address = carray(job, 6, np.float64)[5], carray(job, 14, np.int64)[6:]
        s, out = carray(team.pointer(address[0]), (B, n), real), carray(team.pointer(address[7]), (B, n), real)
        width = carray(team.pointer(address[1]), 1, np.int64)[0]
        classes = carray(team.pointer(address[2]), (B, width), np.int64)
        values = carray(team.pointer(address[3]), (B, width), real)
        a, scale = carray(team.pointer(address[4]), B, real), carray(team.pointer(address[5]), B, real)
        c = carray(team.pointer(address[6]), (B, k + 1), real)
        start = team.take(job, step)
        while start < B:
            r = slice(start, min(start + step, B))
            _gradient_rows(s[r], theta, classes[r], values[r], a[r], scale[r], c[r], out[r])
            start = team.take(job, step)

    return body.ctypes
