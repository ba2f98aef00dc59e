"""The label's margin and its gradient on the CPU: the algorithm of torch_path, one row at a time, compiled by numba.

A row is read twice: once for its largest scores, once for the odds, which are written where the gradient will be. Power
sums and Horner's rule go over it in pieces that stay in the first-level cache; the polynomials, a few hundred numbers,
are in double precision. Rows are shared out among threads; nothing in a row depends on another.
"""

import math
import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from numba import njit
from torch import Tensor

PIECE = 512  # scores to work on at a time
# Scores that one thread does by itself, about 3 ms of work: for about as long torch's own threads go on spinning after
# each of its operations, and a second thread would share a core with one of them.
ALONE = 1 << 19

# products may be fused with sums, and one function's long sums reordered; differences of scores never: they are exact
_compiled = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})
_summing = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc"})

LOG2E = np.float32(1 / math.log(2))
LN2_HIGH = np.float32(0.693359375)  # nine bits: its multiples are exact
LN2_LOW = np.float32(math.log(2) - 0.693359375)
SERIES = tuple(np.float32(1 / math.factorial(j)) for j in range(8))


def label_margins(s: Tensor, label: Tensor, k: int, theta: float) -> tuple[Tensor, Tensor]:
    """The margin theta l_y [B] of each row's label and its gradient to the scores: [B, n], [B] -> [B], [B, n]."""
    margin = torch.empty(s.shape[0], dtype=torch.float64)
    gradient = torch.empty_like(s)
    rows, real = s.numpy(), s.numpy().dtype.type
    floor = real(0.4 * math.log(torch.finfo(s.dtype).tiny))
    arrays = (rows, label.numpy(), k, float(theta), real(1 / theta), floor, margin.numpy(), gradient.numpy())
    threads = max(1, min(torch.get_num_threads(), s.shape[0])) if s.numel() > ALONE else 1
    bounds = [s.shape[0] * t // threads for t in range(threads + 1)]
    others = [_pool(os.getpid()).submit(_rows, *arrays, *span) for span in pairwise(bounds[1:])]
    _rows(*arrays, 0, bounds[1])
    for other in others:
        other.result()
    return margin, gradient


@lru_cache(maxsize=1)
def _pool(process: int) -> ThreadPoolExecutor:
    """Threads that sleep between calls; a forked process starts its own."""
    return ThreadPoolExecutor(max_workers=os.cpu_count() or 1, thread_name_prefix="topk_registry")


@_compiled
def _rows(s, label, k, theta, inverse, floor, margin, gradient, start, stop):
    T = min(2 * k + 1, s.shape[1] - 1)
    top, where = np.empty(T, s.dtype), np.empty(T, np.int64)
    P, x, q, p, in_top = np.empty(k + 1), np.empty(T), np.empty(T), np.empty(T), np.empty(T)
    before, after = np.empty((T + 1, k + 1)), np.empty((T + 1, k + 1))
    maxima = np.empty(32 if T < 16 else 2 * T, s.dtype)
    piece, exponent = np.empty(PIECE, s.dtype), np.empty(PIECE, np.int32)
    c = np.empty(k + 1, s.dtype)
    for r in range(start, stop):
        row, g, y = s[r], gradient[r], label[r]
        if not (_largest(row, y, top, where, maxima, exponent) and np.isfinite(top[k - 1])):
            margin[r] = np.nan
            g[:] = np.nan
            continue
        a = top[k - 1]
        _odds(row, a, inverse, floor, g, piece, exponent)
        g[y] = 0
        for j in range(T):
            g[where[j]] = 0
            x[j] = (np.float64(top[j]) - np.float64(a)) / theta
        _power_sums(g, P, piece)
        t = _tilt(x, P[1], k)
        for j in range(T):
            e = math.exp(-abs(x[j] - t))
            small, large = e / (1 + e), 1 / (1 + e)
            q[j], p[j] = (small, large) if x[j] > t else (large, small)
        _tail_polynomial(P, t, before[0])
        _products(q, p, before, after)
        ratio = before[T, k - 1] / before[T, k]
        _leave_out(p, before, after, in_top)
        scale = 1 / before[T, k]
        for j in range(k, -1, -1):  # tilted so that coefficients k-1 and k are equal; too small ones would go denormal
            scaled = before[T, j] * scale
            c[j] = scaled if scaled > 2.0**-70 else 0.0
            scale /= ratio
        _divide_out(g, c, s.dtype.type(math.exp(-t) * ratio), piece)
        for j in range(T):
            g[where[j]] = in_top[j]
        g[y] = 1
        margin[r] = np.float64(row[y]) - np.float64(a) + theta * (math.log(ratio) - t)


@_compiled
def _largest(row, y, top, where, maxima, found):
    """The T largest scores but the label's, largest first, and their classes; False if there is a NaN."""
    T, held = len(top), 0
    least = row.dtype.type(-np.inf)
    if len(row) >= 4 * len(maxima):
        least = _lower_bound(row, maxima, top)
    for start in range(0, len(row), PIECE):
        piece = row[start : start + PIECE]
        candidates = 0
        for i in range(len(piece)):  # without a branch: which scores reach the bound cannot be foretold
            found[candidates] = i
            candidates += not piece[i] < least
        for i in found[:candidates]:
            v = piece[i]
            if v != v:
                return False
            if (held < T or v > top[T - 1]) and start + i != y:
                held = min(held + 1, T)
                where[_insert(top, held, v, where)] = start + i
    return True


@_compiled
def _insert(top, held, v, where):
    """Put v in its place among the first ``held`` of the scores that fall from left to right; the last one goes."""
    j = held - 1
    while j > 0 and top[j - 1] < v:
        top[j], where[j] = top[j - 1], where[j - 1]
        j -= 1
    top[j] = v
    return j


@_compiled
def _lower_bound(row, maxima, top):
    """A score that T + 1 others reach, to spare the search for the T largest from looking closely at most of them: of
    the maxima over every len(maxima)-th score, the one after the T largest. The one too many may be the label.
    """
    G, T = len(maxima), len(top)
    maxima[:] = -np.inf
    for start in range(0, len(row) - G + 1, G):
        line = row[start : start + G]
        for j in range(G):
            maxima[j] = line[j] if line[j] > maxima[j] else maxima[j]
    top[:] = -np.inf
    after = top.dtype.type(-np.inf)
    for v in maxima:
        if v > top[T - 1]:
            after = top[T - 1]
            j = T - 1
            while j > 0 and top[j - 1] < v:
                top[j] = top[j - 1]
                j -= 1
            top[j] = v
        elif v > after:
            after = v
    return after


@_compiled
def _odds(row, a, inverse, floor, w, piece, exponent):
    """w = exp(min((row - a) / theta, 0)), and 0 where that is too small to change anything.

    In single precision exp(u) = 2^m exp(f), u = m log 2 + f: f is at most 0.35, where eight terms of the series leave
    an error of 6e-9, and 2^m is made by writing its exponent. Loops of this kind become vector instructions.
    """
    power = exponent.view(np.float32)
    for start in range(0, len(row), PIECE):
        length = min(PIECE, len(row) - start)
        scores, out = row[start : start + length], w[start : start + length]
        if row.itemsize == 8:
            for i in range(length):
                u = min((scores[i] - a) * inverse, 0.0)
                out[i] = math.exp(u) if u > floor else 0.0
            continue
        for i in range(length):
            u = (scores[i] - a) * inverse
            piece[i] = min(max(u, floor), np.float32(0))
        for i in range(length):
            exponent[i] = (np.int32(np.floor(piece[i] * LOG2E + np.float32(0.5))) + np.int32(127)) << np.int32(23)
        for i in range(length):
            m = np.floor(piece[i] * LOG2E + np.float32(0.5))
            f = (piece[i] - m * LN2_HIGH) - m * LN2_LOW
            e = SERIES[7]
            for j in range(7):
                e = e * f + SERIES[6 - j]
            out[i] = e * power[i] if piece[i] > floor else np.float32(0)


@_summing
def _power_sums(w, P, piece):
    """P_j = sum_i w_i^j, j = 1..k; small odds are raised to a bound as in torch_path.power_sums, and why."""
    k = len(P) - 1
    bits, span = (50.0, 120.0) if w.itemsize == 4 else (120.0, 1000.0)
    P[:] = 0
    for start in range(0, len(w), PIECE):
        base = w[start : start + PIECE]
        v = piece[: len(base)]
        v[:] = base
        P[1] += base.sum()
        reach, bound = 1.0, w.dtype.type(0)
        for j in range(2, k + 1):
            if j > reach:
                bound, reach = w.dtype.type(2.0 ** (-bits / j)), span * j / bits
                least = w.dtype.type(np.float64(bound) ** (j - 1))
                for i in range(len(v)):
                    v[i] = max(v[i], least)
            total = w.dtype.type(0)
            for i in range(len(v)):
                v[i] *= max(base[i], bound)
                total += v[i]
            P[j] += total


@_compiled
def _tilt(x, mass, k):
    """t = min over m < k of log(R_m / (k - m)), see torch_path.tilt."""
    R = mass
    for j in range(k - 1, len(x)):
        R += math.exp(x[j])
    least = R
    for m in range(k - 2, -1, -1):
        R += math.exp(min(x[m], 60.0))
        least = min(least, R / (k - m))
    return math.log(least)


@_compiled
def _tail_polynomial(P, t, b):
    """b_0..b_k of prod (1 + w_i X), w tilted by t, by Newton's identities; scaled by exp(-P_1 / 2) to stay in range."""
    scale = math.exp(-t)
    factor = scale
    for j in range(1, len(P)):
        P[j] *= factor
        factor *= scale
    b[0] = math.exp(-0.5 * P[1])
    for j in range(1, len(b)):
        total = 0.0
        for i in range(1, j + 1):
            term = b[j - i] * P[i]
            total += term if i % 2 else -term
        b[j] = total / j


@_compiled
def _products(q, p, before, after):
    """before[i]: the tail times the first i factors q + p X; after[i]: the product of all factors from the i-th on."""
    T = len(p)
    after[T, :] = 0
    after[T, 0] = 1
    for i in range(T):
        _times(before[i], q[i], p[i], before[i + 1])
        h = T - 1 - i
        _times(after[h + 1], q[h], p[h], after[h])


@_compiled
def _times(c, q, p, out):
    out[0] = q * c[0]
    for j in range(1, len(c)):
        out[j] = q * c[j] + p * c[j - 1]


@_compiled
def _leave_out(p, before, after, in_top):
    """p_i (e_{k-2} / c_{k-1} - e_{k-1} / c_k), e the product without factor i: the gradient at the top group."""
    T, k = len(p), before.shape[1] - 1
    c_below, c_k = before[T, k - 1], before[T, k]
    for i in range(T):
        two_below, below = 0.0, before[i, k - 1] * after[i + 1, 0]
        for j in range(k - 1):
            two_below += before[i, j] * after[i + 1, k - 2 - j]
            below += before[i, j] * after[i + 1, k - 1 - j]
        in_top[i] = p[i] * (two_below / c_below - below / c_k)


@_compiled
def _divide_out(w, c, scale, piece):
    """w <- v (d_{k-2} (1 + v) - 1), v = scale w, d = c / (1 + v X) by Horner's rule, c_{k-1} = c_k = 1."""
    k, one = len(c) - 1, w.dtype.type(1)
    for start in range(0, len(w), PIECE):
        v = w[start : start + PIECE]
        d = piece[: len(v)]
        for i in range(len(v)):
            v[i] *= scale
            d[i] = c[0]
        for j in range(1, k - 1):
            for i in range(len(v)):
                d[i] = c[j] - v[i] * d[i]
        for i in range(len(v)):
            v[i] = v[i] * (d[i] * (one + v[i]) - one) if k > 1 else -v[i]
