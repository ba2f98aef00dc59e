"""State and gradient of the rows of a chunk of classes, see chunks.py."""

import numpy as np

from topk_registry.ops.cpu import blocks, select
from topk_registry.ops.cpu.memory import empty
from topk_registry.ops.cpu.numbers import NO_CLASS, compiled, copy, lowest
from topk_registry.ops.ksubset.numba import rows


@compiled
def state_rows(s, k, theta, top, where, P):
    (B, n), T = s.shape, top.shape[1]
    inverse, floor = rows.limits(s, theta)
    room, scratch, w = select.room(n, T, s.dtype), empty(blocks.CACHE_BLOCK, s.dtype), empty(n, s.dtype)
    for r in range(B):
        if not select.largest(s[r], NO_CLASS, top[r], where[r], room):  # too many are NaN
            top[r], where[r], P[r] = np.nan, 0, np.nan
            continue
        a = lowest(s.dtype)  # as torch/rows.py
        rows.odds(s[r], max(a, top[r, k - 1]) if k <= T else a, inverse, floor, w)
        for j in range(T):
            w[where[r, j]] = 0
        rows.power_sums(w, P[r], scratch)


@compiled
def gradient_rows(s, theta, classes, values, a, scale, g, c, out):
    B, n = s.shape
    inverse, floor = rows.limits(s, theta)
    scratch, w, k = empty(blocks.CACHE_BLOCK, s.dtype), empty(n, s.dtype), c.shape[1] - 1
    padded = rows.coefficients(k, s.dtype)
    for r in range(B):
        rows.odds(s[r], a[r], inverse, floor, w)
        copy(c[r], padded[blocks.FRONT :])
        rows.label_gradient(w, padded, scale[r], g[r], k, scratch)
        copy(w, out[r])
        for j in range(classes.shape[1]):
            if 0 <= classes[r, j] < n:
                out[r, classes[r, j]] = values[r, j]
