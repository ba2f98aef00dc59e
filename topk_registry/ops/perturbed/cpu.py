"""The perturbed k-th largest score on the CPU, and the hinge loss with this score, compiled by numba.

The perturbed score of a class is the score plus noise. For each row, a search finds a threshold that at least k
perturbed scores reach in nearly every draw. Noise is computed only for classes that can reach the threshold. To limit
this work, at most 1.7 (k + 1.5 sqrt(k) + 2) perturbed scores may reach the threshold on average.

The noise of a class is a function of a random number: the larger the number, the smaller the noise. Therefore, a class
whose random number has a large first byte cannot reach the threshold, and its noise is not computed. How large the byte
must be depends on the score of the class. If fewer than k perturbed scores reach the threshold, the same draw is
computed again with a lower threshold. If even the lower threshold is too high, the draw is computed with all classes.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# numba's intrinsics are called without their first parameter

import math
from collections import namedtuple

import numpy as np
import torch
from torch import Tensor

from topk_registry.ops.backend import laid_out
from topk_registry.ops.cpu.blocks import fill, has_nan, largest_size, out_of_range, total_of, write_masses
from topk_registry.ops.cpu.driver import add_up, kernel, spans
from topk_registry.ops.cpu.masks import lowest_bit, within
from topk_registry.ops.cpu.memory import array, borrowed
from topk_registry.ops.cpu.numbers import ZERO, compiled, inlined, number_32, summing
from topk_registry.ops.masses import Masses
from topk_registry.ops.perturbed.noise import TABLE, first_bytes, normal, other_bytes, table

LEAST_WORK = 1 << 15  # a thread gets at least this many scores times draws, about 20 microseconds of work
SCORES_AT_ONCE = 1 << 14  # a thread takes at most this many scores at a time
PAD = 256  # first bytes are generated for a multiple of 256 classes, so that vector loops have no remainder
AT_ONCE = 16  # other bytes are generated for a multiple of 16 candidates

# Upper bound of Q(x) for 0 < x < 9.6: 2^-(1 + LINEAR x + SQUARE x^2). For x < 3.3, the bound is less than 4 % too high.
LINEAR, SQUARE = 1.001, 0.6125
HALF_BITS = np.float32(126 << 23)  # bits of 1/2 in float32; subtracting 2^23 from the bits halves a number
LINEAR_BITS, SQUARE_BITS = np.float32(LINEAR * 2**23), np.float32(SQUARE * 2**23)
FARTHEST = np.float32(12)
BYTES = np.float32(256.1)  # 256 plus a margin for rounding
# If m is the least expected number of scores above the threshold, the search aims at AIM m, and accepts up to MOST m.
AIM, MOST = 1.2, 1.7

# Scratch memory of a thread. limit bounds the first byte of each class, and words holds the first bytes. calls and u
# hold the candidates and their random numbers, v their scores plus noise. classes [draws] holds, for each draw, the
# class with the k-th largest score plus noise. mass and costs [n] hold the mass and the loss of each class; they are
# empty if only labels have masses. guess [1] is where the search for the next row's threshold begins, and affects
# only the time.
Memory = namedtuple("Memory", "limit words calls u v classes mass costs guess")


def kth(scores: Tensor, seed: Tensor, k: int, epsilon: float, num_samples: int) -> tuple[Tensor, Tensor]:
    """Return the k-th largest entry of scores + epsilon * noise, averaged over the draws: [B].

    Also return the class of the k-th largest entry in each draw: [B, num_samples].

    Args:
        scores: [B, n] in float32.
        seed: int64 []. The noise is a function of the seed, the row index, the draw and the class.
        k, epsilon, num_samples: rank, standard deviation of the noise, number of draws.
    """
    index = torch.empty(len(scores), num_samples, dtype=torch.int64, device="cpu")
    return _run(scores, seed, k, epsilon, num_samples, index, 0, 0.0, 1.0, *[None] * 7), index


def hinge(
    scores: Tensor,
    needs_grad: bool,
    *,
    masses: Masses,
    seed: Tensor,
    k: int,
    epsilon: float,
    num_samples: int,
    alpha: float | Tensor,
    scale: float,
    sums: bool,
) -> tuple[Tensor, Tensor]:
    """Return the losses [B], sum_c q_c scale max(0, alpha_c + f(s) - s_c), and their gradient [B, n].

    Args:
        scores, seed, k, epsilon, num_samples: as in :func:`kth`. The first result of :func:`kth` is f(s).
        needs_grad: unused, because the gradient costs little.
        masses: the mass q_c of each class c in each row.
        alpha: required margin, one number or one per class [n].
        scale: factor of the loss.
        sums: whether to return the sum [] of the losses instead.
    """
    total = torch.empty((), device="cpu") if sums else None
    gradient = torch.empty(scores.shape, dtype=torch.float32, device="cpu")
    one, gaps = (0.0, laid_out(alpha, torch.float64)) if isinstance(alpha, Tensor) else (float(alpha), None)
    m = 0 if masses.labels is None else masses.labels.shape[1]
    types = (torch.int64, torch.float64, torch.float64, torch.float32)
    parts = [None if t is None else laid_out(t, dtype) for t, dtype in zip(masses[:4], types, strict=True)]
    options = m, one, float(scale), gradient, gaps, total, *parts
    losses = _run(scores, seed, k, epsilon, num_samples, None, *options)
    return losses if total is None else total, gradient


def _run(scores: Tensor, seed: Tensor, k: int, epsilon: float, draws: int, *options: Tensor | float | None) -> Tensor:
    s = laid_out(scores, torch.float32)
    B, n = s.shape
    value = s.new_empty(B)
    threads = max(1, min(torch.get_num_threads(), B, B * n * draws // LEAST_WORK))
    block = max(1, min(SCORES_AT_ONCE // n, -(-B // threads)))
    body.run(threads, B, n, k, draws, block, seed, float(epsilon), s, table(), value, *options)
    return value


@kernel
def body(job):
    """Compute rows for :func:`hinge` if ``job``, the array of arguments, contains a gradient, else for :func:`kth`."""
    field = array(job, 23, np.int64)
    B, n, draws, block = field[2], field[3], field[5], field[6]
    value, total = array(field[11], B, np.float32), array(field[18], 1 if field[18] != 0 else 0, np.float32)
    memory, done = memory_for(n, draws, field[21] != 0 or field[22] != 0), ZERO
    for start, stop in spans(job, block, B):
        rows(job, start, stop, memory)
        done += stop - start
    add_up(job, done, value, total)


@compiled
def memory_for(n, draws, all_classes):
    """Return the scratch memory of a thread for :func:`rows`. ``all_classes``: whether every class may have a mass."""
    size = (n + PAD - 1) // PAD * PAD
    m = n if all_classes else 0
    return Memory(
        np.empty(size, np.uint8), np.empty(size // 8, np.uint64), np.empty(size, np.uint64),
        np.empty(size, np.uint64), np.empty(size), np.empty(draws, np.int64), np.empty(m, np.float32),
        np.empty(m, np.float32), np.zeros(1),
    )  # fmt: skip


@compiled
def rows(job, start, stop, memory):
    """Compute the rows from ``start`` to ``stop`` of a call. ``memory`` is the result of :func:`memory_for`."""
    field, real, memory = array(job, 23, np.int64), array(job, 16, np.float64), borrowed(memory)
    B, n, k, draws, m = field[2], field[3], field[4], field[5], field[13]
    key, epsilon, alpha, scale = array(field[7], 2, np.uint32), real[8], real[14], real[15]
    s, quantiles = array(field[9], (B, n), np.float32), array(field[10], TABLE, np.float64)
    value, index = array(field[11], B, np.float32), array(field[12], (B if field[12] != 0 else 0, draws), np.int64)
    gradient, gaps = array(field[16], (B, n), np.float32), array(field[17], n if field[17] != 0 else 0, np.float64)
    labels, shares = array(field[19], (B, m), np.int64), array(field[20], (B, m), np.float64)
    even = array(field[21], B if field[21] != 0 else 0, np.float64)
    dense = array(field[22], (B if field[22] != 0 else 0, n), np.float32)
    mass, classes, is_hinge = memory.mass, memory.classes, field[16] != 0
    for r in range(start, stop):
        if is_hinge:
            if out_of_range(labels[r], n):
                fill(gradient[r], np.nan)
                value[r] = np.nan
                continue
            if len(mass) > 0:
                has_mass = write_masses(r, labels, shares, even, dense, mass)
            else:
                has_mass = largest_size(shares[r]) != 0
            if not has_mass or len(mass) == 0:
                fill(gradient[r], np.float32(0))
            if not has_mass:
                value[r] = 0
                continue
        if len(index) > 0:
            classes = index[r]
        t = of_row(s[r], r, k, epsilon, key, quantiles, classes, memory)
        value[r] = t
        if is_hinge and len(mass) > 0:
            value[r] = hinges_of_all(s[r], t, mass, gaps, alpha, scale, classes, gradient[r], memory.costs)
        elif is_hinge:
            value[r] = hinges(s[r], t, labels[r], shares[r], gaps, alpha, scale, classes, gradient[r])


@compiled
def hinges(row, threshold, labels, shares, gaps, alpha, scale, index, g):
    """Return the loss of a row, as :func:`hinge` defines it, and write the gradient of the loss to ``g`` [n].

    All numbers in ``g`` are 0 before the call. ``threshold`` is f(s). ``gaps`` [n] holds the required margins. If
    ``gaps`` is empty, ``alpha`` is the required margin of every class. ``index`` holds, for each draw, the class with
    the k-th largest perturbed score. The gradient of ``threshold`` is spread evenly over these classes.
    """
    cost, slope = 0.0, 0.0
    for j in range(len(labels)):
        y, mass = labels[j], scale * shares[j]
        distance = (gaps[y] if len(gaps) > 0 else alpha) + (threshold - np.float64(row[y]))
        if mass != 0 and not distance < 0:
            cost += mass * distance
            slope += mass
            g[y] -= np.float32(mass)
    if threshold != threshold and cost != cost:  # the scores contain NaN, and at least one class has a mass
        fill(g, np.nan)
    for i in index:
        g[i] += np.float32(slope / len(index))
    return cost


@compiled
def hinges_of_all(row, threshold, mass, gaps, alpha, scale, index, g, costs):
    """Return the loss of a row and write its gradient to ``g``, as :func:`hinges`, for masses of all classes [n].

    ``costs`` [n] is memory for the loss of each class.
    """
    for i in range(len(row)):
        distance = (gaps[i] if len(gaps) > 0 else alpha) + (threshold - np.float64(row[i]))
        active = 0.0 if distance < 0 else scale * np.float64(mass[i])
        g[i] = np.float32(-active)
        costs[i] = np.float32(0.0 if active == 0 else active * distance)
    cost, slope = total_of(costs), -total_of(g)
    if cost != cost:
        fill(g, np.nan)
    for i in index:
        g[i] += np.float32(slope / len(index))
    return cost


@compiled
def of_row(row, r, k, epsilon, key, quantiles, index, memory):
    """Return the mean over the draws of the k-th largest of scores plus noise.

    Args:
        row: scores [n].
        r: row index in the batch. The noise is a function of row index, key, draw and class.
        key: the seed as two integers of 32 bits.
        quantiles: result of :func:`table`, from which the noise is computed.
        index: output [draws]: for each draw, the class with the k-th largest of scores plus noise.
        memory: result of :func:`memory_for`.
    """
    if has_nan(row):
        fill(index, 0)
        return np.nan
    limit, words, calls, u, v = memory.limit, memory.words, memory.calls, memory.u, memory.v
    size, r = np.uint64(len(limit)), np.uint64(r)
    byte = words.view(np.uint8)
    threshold = find_threshold(row, k, epsilon, memory.guess[0], limit)
    memory.guess[0], lower = (threshold, epsilon) if threshold > -np.inf else (0.0, np.inf)
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
            reached += np.uint64(x >= threshold)
        if reached >= k:
            fill(v[reached : reached + AT_ONCE], -np.inf)
            j = kth_of(v[: (reached + AT_ONCE - 1) // AT_ONCE * AT_ONCE], k)
            total += v[j]
            index[draw] = calls[j]
            draw += 1
        else:  # repeat this draw with a lower threshold, then with all classes
            threshold, lower = np.float64(np.float32(threshold - lower)), np.inf
            set_limits(row, threshold, epsilon, limit)
    return total / len(index)


@compiled
def find_threshold(row, k, epsilon, guess, limit):
    """Return a threshold that at least k of the scores plus noise reach in about 99 of 100 draws.

    On average, at most 1.7 (k + 1.5 sqrt(k) + 2) scores plus noise reach the threshold. The search begins at ``guess``.
    If no such threshold is found, return a lower threshold that more scores reach, or -inf.

    The noise of a class is computed from a random number: the larger the number, the smaller the noise. The function
    also writes ``limit[i]``: class i cannot reach the threshold if the first byte of its number exceeds this limit.
    """
    few, low, high, threshold, step = k + 1.5 * math.sqrt(k) + 2, -np.inf, np.inf, np.float64(guess), epsilon
    for _ in range(24 if few < len(row) else 0):
        count = set_limits(row, threshold, epsilon, limit)
        if few <= count <= MOST * few:
            return threshold
        low, high = (low, threshold) if count < few else (threshold, high)
        if low > -np.inf and high < np.inf:
            threshold = (low + high) / 2
        else:  # the logarithm of the count decreases by about 1 per epsilon
            threshold += step * math.log(count / (AIM * few))
            step *= 4
        threshold = np.float64(np.float32(threshold))  # rounded once, so that all comparisons use the same value
    set_limits(row, low, epsilon, limit)
    return low


@inlined
def set_limits(row, threshold, epsilon, limit):
    if threshold == -np.inf:  # every class reaches this threshold
        fill(limit, 255)
        return np.float64(len(row))
    return np.float64(tails(row, np.float32(threshold), np.float32(1 / epsilon), limit))


@summing
def tails(row, threshold, inverse, limit):
    """Set ``limit[i]``: class i cannot reach ``threshold`` if the first byte of its random number exceeds this limit.

    Class i reaches ``threshold`` if ``row[i]`` plus noise is at least ``threshold``. The noise is a function of the
    random number: the larger the number, the smaller the noise. Return an upper bound on the expected number of classes
    that reach ``threshold``. ``inverse`` is 1 / epsilon.
    """
    count = np.float32(0)
    for i in range(len(row)):
        q = tail((threshold - row[i]) * inverse)
        count += q
        limit[i] = min(np.int32(BYTES * q), np.int32(255))
    return count


@inlined
def tail(x):
    """Return an upper bound on Q(x), the probability that standard normal noise exceeds x. If x <= 0, return 1."""
    # 2^-(1 + LINEAR x + SQUARE x^2), where the power of 2 is interpolated linearly between integer exponents
    y = x if x < FARTHEST else FARTHEST
    q = number_32(np.int32(HALF_BITS - y * (LINEAR_BITS + SQUARE_BITS * y)))
    return q if x > np.float32(0) else np.float32(1)


@compiled
def candidates(byte, limit, n, first, calls, u):
    """Find the classes i < n with ``byte[i] <= limit[i]``. Return the number m of these classes.

    For each of these classes, write ``byte[i]``, the first of the eight bytes of its random number, to an entry of
    ``u``. The other seven bytes become 0. :func:`other_bytes` generates these bytes later, as a function of the number
    ``first + i``, which is written to the same entry of ``calls``.
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
def kth_of(v, k):  # the index of the k-th largest number of v
    for j in range(len(v)):
        above, reached = 0, 0
        for i in range(len(v)):
            above += v[i] > v[j]
            reached += v[i] >= v[j]
        if above < k <= reached:
            return j
    return -1
