"""The perturbed k-th largest score and its hinge on the CPU, compiled by numba; noise is made only where it can matter.

For each row, a height is found that k scores of nearly every draw reach, and not many more. From it follows a limit for
each class: if the first byte of its uniform number is above the limit, then its score cannot reach the height, and its
normal is never computed. See README.md.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# numba's intrinsics are called without their first parameter

import math

import numpy as np
import torch
from torch import Tensor

from topk_registry.ops.cpu.blocks import fill
from topk_registry.ops.cpu.driver import kernel, spans
from topk_registry.ops.cpu.masks import lowest_bit, within
from topk_registry.ops.cpu.memory import address_of, array, borrowed, empty
from topk_registry.ops.cpu.numbers import compiled, inlined, number_32, summing
from topk_registry.ops.perturbed.noise import TABLE, first_bytes, normal, other_bytes, table
from topk_registry.ops.tensors import laid_out

LEAST_WORK = 1 << 15  # scores, counted in every draw, per thread at least: about 20 microseconds of work
SCORES_AT_ONCE = 1 << 14  # scores that a thread takes at a time, at most
PAD = 256  # first bytes are made for a multiple of so many classes: loops of vector instructions without a remainder
AT_ONCE = 16  # other bytes are made for a multiple of so many candidates

# Q(x) < 2^-(1 + LINEAR x + SQUARE x^2) for 0 < x < 9.6, by less than 4 percent below 3.3
LINEAR, SQUARE = 1.001, 0.6125
HALF_BITS = np.float32(126 << 23)  # of 1/2 in single precision; an octave is 2^23
LINEAR_BITS, SQUARE_BITS = np.float32(LINEAR * 2**23), np.float32(SQUARE * 2**23)
FARTHEST = np.float32(12)
BYTES = np.float32(256.1)  # the tenth is for rounding
# Of the number of scores to expect above the height: what is aimed at, and the most
AIM, MOST = 1.2, 1.7


def kth(scores: Tensor, seed: Tensor, k: int, epsilon: float, num_samples: int) -> tuple[Tensor, Tensor]:
    """Return the mean k-th largest score [B] over the draws, and which class it was in each draw [B, num_samples].

    Args:
        scores: [B, n] in single precision.
        seed: int64 []. The noise is a function of the seed, the row's place, the draw and the class.
        k, epsilon, num_samples: rank, standard deviation of the noise, number of draws.
    """
    value, index, _ = _run(scores, seed, k, epsilon, num_samples)
    return value, index


def hinge(
    scores: Tensor,
    labels: Tensor,
    shares: Tensor,
    seed: Tensor,
    k: int,
    epsilon: float,
    num_samples: int,
    alpha: float | Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return the losses sum_j shares_j scale (alpha + f(s) - s_{y_j})_+ [B] and their gradient, f as in :func:`kth`.

    Args:
        scores, seed, k, epsilon, num_samples: as in :func:`kth`.
        labels, shares: classes y [B, m] and their masses.
        alpha: required gap, one number or one per class [n].
        scale: factor of the loss.
    """
    gaps = laid_out(alpha, torch.float64) if isinstance(alpha, Tensor) else None
    alpha, labels = 0.0 if isinstance(alpha, Tensor) else alpha, laid_out(labels, torch.int64)
    value, _, gradient = _run(
        scores, seed, k, epsilon, num_samples, labels, laid_out(shares, torch.float64), gaps, alpha, scale
    )
    assert gradient is not None
    return value, gradient


def _run(
    scores: Tensor,
    seed: Tensor,
    k: int,
    epsilon: float,
    draws: int,
    labels: Tensor | None = None,
    shares: Tensor | None = None,
    gaps: Tensor | None = None,
    alpha: float = 0.0,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor | None]:
    s = laid_out(scores.detach(), torch.float32)
    B, n = s.shape
    value, index = s.new_empty(B), s.new_empty(B, draws, dtype=torch.int64)
    gradient, m = (None, 0) if labels is None else (torch.empty_like(s), labels.shape[1])
    threads = max(1, min(torch.get_num_threads(), B, B * n * draws // LEAST_WORK))
    block = max(1, min(SCORES_AT_ONCE // n, -(-B // threads)))
    if B:
        body.run(
            threads, B, n, k, draws, block, m, int(seed), float(epsilon), float(alpha), float(scale),
            s, table(), value, index, gradient, labels, shares, gaps,
        )  # fmt: skip
    return value, index, gradient


@kernel
def body(job):
    """Rows of :func:`kth`, or of :func:`hinge` if there are labels."""
    _, B, n, k, draws, block, m = array(job, 7, np.int64)
    key, real, address = array(job, 16, np.uint32)[14:], array(job, 11, np.float64), array(job, 19, np.int64)[11:]
    epsilon, alpha, scale = real[8], real[9], real[10]
    s, quantiles = array(address[0], (B, n), np.float32), array(address[1], TABLE, np.float64)
    value, index = array(address[2], B, np.float32), array(address[3], (B, draws), np.int64)
    gradient = array(address[4], (B, n), np.float32)
    labels, shares = array(address[5], (B, m), np.int64), array(address[6], (B, m), np.float64)
    gaps = array(address[7], n if address[7] != 0 else 0, np.float64)
    memory = scratch(n)
    space, guess = borrowed(memory), 0.0
    for start, stop in spans(job, block, B):
        for r in range(start, stop):
            if m > 0:
                fill(gradient[r], 0)
                if not _any(shares[r]):
                    value[r] = 0
                    continue
            t, guess = of_row(s[r], r, k, epsilon, key, quantiles, index[r], guess, space)
            value[r] = t
            if m > 0:
                value[r] = hinges(s[r], t, labels[r], shares[r], gaps, alpha, scale, index[r], gradient[r])


@compiled
def _any(x):
    for i in range(len(x)):  # noqa: SIM110 (numba compiles no generators)
        if x[i] != 0:
            return True
    return False


@compiled
def hinges(row, threshold, labels, shares, gaps, alpha, scale, index, g):
    """Return the loss of a row, and add its gradient to ``g``."""
    if threshold != threshold:
        fill(g, np.nan)
        return np.nan
    cost, slope = 0.0, 0.0
    for j in range(len(labels)):
        y, mass = labels[j], scale * shares[j]
        violation = (gaps[y] if len(gaps) > 0 else alpha) + (threshold - np.float64(row[y]))
        if mass != 0 and not violation < 0:
            cost += mass * violation
            slope += mass
            g[y] -= np.float32(mass)
    for i in index:
        g[i] += np.float32(slope / len(index))
    return cost


@compiled
def scratch(n):
    """Return memory of :func:`of_row`: a limit and a first byte for each class, and candidates."""
    size = (n + PAD - 1) // PAD * PAD
    words, u, calls = empty(size // 8, np.uint64), empty(size, np.uint64), empty(size, np.uint64)
    return empty(size, np.uint8), words, calls, u, empty(size, np.float64)


@compiled
def of_row(row, r, k, epsilon, key, quantiles, index, guess, space):
    """Return the mean over the draws of the k-th largest perturbed score, and a guess of the next row's height.

    Args:
        row: scores [n].
        r: the row's place in the batch; with the key, the draw and the class it decides on the noise.
        index: receives the class that was k-th at each draw [draws].
        guess: guess of the height. It decides on the time only.
        space: from :func:`scratch`.
    """
    if _has_nan(row):
        fill(index, 0)
        return np.nan, guess
    limit, words, calls, u, v = space
    size, r = np.uint64(len(limit)), np.uint64(r)
    byte = array(address_of(words), len(limit), np.uint8)
    height = find_height(row, k, epsilon, guess, limit)
    guess, lower = (height, epsilon) if height > -np.inf else (0.0, np.inf)
    total, draw = 0.0, 0
    while draw < len(index):
        first = np.uint64(draw) * size
        first_bytes(first >> np.uint64(4), r, key, words)
        m = candidates(byte, limit, len(row), first, calls, u)
        other_bytes(calls, r, key, u[: (m + AT_ONCE - 1) // AT_ONCE * AT_ONCE])
        reached = np.uint64(0)
        for j in range(m):
            i = calls[j] - first
            x = np.float64(row[i]) + epsilon * normal(u[j], quantiles)
            v[reached], calls[reached] = x, i
            reached += np.uint64(x >= height)
        if reached >= k:
            fill(v[reached : reached + AT_ONCE], -np.inf)
            j = kth_of(v[: (reached + AT_ONCE - 1) // AT_ONCE * AT_ONCE], k)
            total += v[j]
            index[draw] = calls[j]
            draw += 1
        else:  # this draw again, with a lower height, then with all classes
            height, lower = np.float64(np.float32(height - lower)), np.inf
            set_limits(row, height, epsilon, limit)
    return total / len(index), guess


@summing
def _has_nan(row):
    nans = np.float32(0)
    for i in range(len(row)):
        nans += np.float32(row[i] != row[i])
    return nans > 0


@compiled
def find_height(row, k, epsilon, guess, limit):
    """Return a height that k scores of nearly every draw reach, and not many more; -inf if none is found.

    One draw in a hundred has fewer, and is repeated; each score more costs a normal in every draw. ``limit`` receives
    the limits for this height.
    """
    few, low, high, height, step = k + 1.5 * math.sqrt(k) + 2, -np.inf, np.inf, np.float64(guess), epsilon
    for _ in range(24 if few < len(row) else 0):
        count = set_limits(row, height, epsilon, limit)
        if few <= count <= MOST * few:
            return height
        low, high = (low, height) if count < few else (height, high)
        if low > -np.inf and high < np.inf:
            height = (low + high) / 2
        else:  # the logarithm of the count falls by about 1 per epsilon
            height += step * math.log(count / (AIM * few))
            step *= 4
        height = np.float64(np.float32(height))  # rounded once, for all that compare with it
    set_limits(row, low, epsilon, limit)
    return low


@inlined
def set_limits(row, height, epsilon, limit):
    """Set the limits of all classes for a height, and return the number of scores to expect above it."""
    if height == -np.inf:
        fill(limit, 255)
        return np.float64(len(row))
    return np.float64(tails(row, np.float32(height), np.float32(1 / epsilon), limit))


@summing
def tails(row, height, inverse, limit):
    """Set ``limit`` to the largest first byte of U with which each class can reach the height; ``inverse``: 1 / epsilon.

    Return the number of scores to expect above the height, a little overrated.
    """
    count = np.float32(0)
    for i in range(len(row)):
        q = tail((height - row[i]) * inverse)
        count += q
        limit[i] = min(np.int32(BYTES * q), np.int32(255))
    return count


@inlined
def tail(x):
    """Return a number in single precision a little above Q(x): 2^-(1 + ...), linear within each octave; 1 below 0."""
    y = x if x < FARTHEST else FARTHEST
    q = number_32(np.int32(HALF_BITS - y * (LINEAR_BITS + SQUARE_BITS * y)))
    return q if x > np.float32(0) else np.float32(1)


@compiled
def candidates(byte, limit, n, first, calls, u):
    """List the classes with a first byte within its limit; return how many.

    ``calls`` <- their numbers in the generator, from ``first`` on. ``u`` <- their uniforms, of the first byte alone.
    """
    m = 0
    for start in range(0, n, 64):
        bits = within(byte, start, limit, start)
        if n - start < 64:
            bits &= (np.uint64(1) << np.uint64(n - start)) - np.uint64(1)
        while bits != 0:
            i = start + lowest_bit(bits)
            calls[m], u[m] = first + np.uint64(i), np.uint64(byte[i]) << np.uint64(56)
            bits &= bits - np.uint64(1)
            m += 1
    return m


@compiled
def kth_of(v, k):
    """Return the place of the k-th largest of at least k numbers, found by ranking one after the other."""
    for j in range(len(v)):
        above, reached = 0, 0
        for i in range(len(v)):
            above += v[i] > v[j]
            reached += v[i] >= v[j]
        if above < k <= reached:
            return j
    return -1
