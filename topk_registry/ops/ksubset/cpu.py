"""The smooth top-k hinge on the CPU, compiled by numba: losses and gradient in single precision, k up to 64.

Threads share the rows. The result of a row depends neither on other rows nor on the thread.
"""
# pyright: reportCallIssue=false, reportArgumentType=false

import math
from collections import namedtuple
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from topk_registry.ops.cpu import blocks
from topk_registry.ops.cpu.driver import kernel, spans
from topk_registry.ops.cpu.memory import array, borrowed, empty, zeros
from topk_registry.ops.cpu.numbers import ZERO, borrowing, compiled, largest_integer
from topk_registry.ops.ksubset import mass_rows, passes, polynomial
from topk_registry.ops.ksubset.split import CERTAIN, INVALID, power_sums, scratch_space, split
from topk_registry.ops.tensors import laid_out

LARGEST_K = 64
LIMIT = 1 / 2  # maximum odds in the tail
LEAST_TAU = 4 * torch.finfo(torch.float32).tiny  # the reciprocal is finite, and hinges already equal their limit at 0
LEAST_WORK = 1 << 14  # minimum number of steps per thread: about 20 microseconds of work
ROWS_AT_ONCE = 16  # maximum number of rows that a thread takes at a time: their polynomials fill vectors
SCORES_AT_ONCE = 1 << 16  # approximate number of scores that a thread takes at a time: they fit in its cache

# space: scratch of split; x: scores of a row; odds: odds of each row; scratch: one block; c: coefficients; size, u,
# most, a: results of split; of_label: score of the label; where, members: top groups; powers: power sums of a row
Memory = namedtuple("Memory", "space x odds scratch c size u most a of_label where members powers")


def losses(
    s: Tensor, masses: tuple[Tensor | None, ...], k: int, tau: float, alpha: Tensor, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the losses [B] and their gradient [B, n].

    Args:
        s: scores [B, n] in single precision, 2k <= n, k <= LARGEST_K, plain memory on the CPU.
        masses: labels [B, m], shares [B, m], even [B] and dense [B, n]. Absent parts are None.
        k: size of the set.
        tau: temperature of the hinge.
        alpha: required margin [] or [n].
        out: memory for the gradient, which may be the memory of s.
    """
    labels, shares, even, dense = masses
    B, n = s.shape
    pitch, stride = s.stride()
    if stride != 1 or pitch < n or s.is_neg():
        s, pitch = laid_out(s, torch.float32), n
    value, gradient = s.new_empty(B), s.new_empty(B, n) if out is None else out
    alpha, tau = laid_out(alpha, torch.float64), max(tau, LEAST_TAU)
    m = 0 if labels is None else labels.shape[1]
    labels = None if labels is None else laid_out(labels, torch.int64)
    shares = None if shares is None else laid_out(shares, torch.float64)
    threads, block = _threads_and_block(k, B, n, torch.get_num_threads())
    sizes = B, n, pitch, k, block, m, alpha.numel()
    common = *sizes, float(tau), s, value, gradient, alpha, labels, shares
    if m == 1 and even is None and dense is None:
        label_body.run(threads, *common)
    else:
        even = None if even is None else laid_out(even, torch.float64)
        dense = None if dense is None else laid_out(dense, torch.float32)
        mass_body.run(threads, *common, even, dense)
    return value, gradient


@lru_cache(maxsize=1024)
def _threads_and_block(k: int, B: int, n: int, most: int) -> tuple[int, int]:
    """Return the number of threads, at most ``most``, and the number of rows that a thread takes at a time."""
    polynomials = (2 * k + 3) ** 2
    steps = B * (n + 500 + 2 * polynomials)  # measured work for the scores and per row
    count = max(1, min(most, B, steps // LEAST_WORK))
    return count, max(1, min(ROWS_AT_ONCE, SCORES_AT_ONCE // n, SCORES_AT_ONCE // polynomials, -(-B // count)))


@borrowing
def _read(job):
    """Return the values of a job: sizes, tau, and the tensors of :func:`losses`."""
    _, B, n, pitch, k, block, m, gaps = array(job, 8, np.int64)
    tau, field = array(job, 9, np.float64)[8], array(job, 17, np.int64)
    s, value = array(field[9], (B, pitch), np.float32), array(field[10], B, np.float32)
    gradient, alpha = array(field[11], (B, n), np.float32), array(field[12], gaps, np.float64)
    labels, shares = array(field[13], (B, m), np.int64), array(field[14], (B, m), np.float64)
    return B, n, k, block, tau, s, value, gradient, alpha, labels, shares


@kernel
def label_body(job):
    """Compute rows with one label each."""
    B, n, k, block, tau, s, value, gradient, alpha, labels, shares = _read(job)
    memory = memory_for(block, n, k)
    for i, j in spans(job, block, B):
        label_rows(s[i:j], labels[i:j, 0], shares[i:j, 0], alpha, k, k * tau, tau, value[i:j], gradient[i:j], memory)


@kernel
def mass_body(job):
    """Compute rows with masses on several classes."""
    B, n, k, block, tau, s, value, gradient, alpha, labels, shares = _read(job)
    field = array(job, 17, np.int64)
    even = array(field[15], B if field[15] != 0 else 0, np.float64)
    dense = array(field[16], (B if field[16] != 0 else 0, n), np.float32)
    memory = mass_rows.memory_for(block, n, k, alpha, tau)
    for i, j in spans(job, block, B):
        mass_rows.mass_rows(
            s[i:j], labels[i:j], shares[i:j], even[i:j], dense[i:j], alpha, k, k * tau, tau, value[i:j],
            gradient[i:j], memory,
        )  # fmt: skip


@compiled
def memory_for(width, n, k):
    """Return memory for up to ``width`` rows."""
    m = blocks.padded(n)
    members = min(3 * k, m)
    return Memory(
        scratch_space(m, k), empty(m, np.float32), empty((width, m), np.float32), empty(blocks.CACHE_BLOCK, np.float32),
        passes.coefficients(k), empty(width, np.int64), empty(width), empty(width), empty(width, np.float32),
        empty(width, np.float32), empty((width, members), np.int64), empty((width, members)), empty(k),
    )  # fmt: skip


@compiled
def label_rows(s, label, share, alpha, k, theta, tau, value, gradient, memory):
    """Write the losses share tau softplus((alpha_y - m_y / k) / tau) of rows with one label y, and their gradient.

    The polynomial is computed without the factor of the label.

    Args:
        s: scores [B, n or more].
        label, share: label of each row and its mass [B]. A row without mass is not read.
        alpha: required margin of each class [n], or [1].
        k, theta, tau: size of the set, temperature of the margins, and temperature of the hinge.
        value, gradient: losses [B] and gradient [B, n], written.
        memory: of :func:`memory_for`.
    """
    B, memory = len(value), borrowed(memory)
    P = zeros((k, B))
    powers = _split_rows(s, label, share, k, theta, gradient.shape[1], memory, P)
    T = largest_integer(memory.size[:B])
    p, q, in_top = empty((T, B)), empty((T, B)), empty((T, B))
    before, after = empty((T + 1, k + 1, B)), empty((T + 1, k + 1, B))
    polynomial.top_group(memory.members, memory.size, memory.u, P, powers, p, q, before, after)
    polynomial.label_gradient(p, q, before, after, in_top)
    _write_rows(label, share, alpha, k, theta, tau, value, gradient, memory, before, in_top)


@borrowing
def _split_rows(s, label, share, k, theta, n, memory, P):
    """Split each row without its label. Write the power sums P [k, B] of the tails. Return how many are not 0."""
    space, x, odds, scratch, _, size, u, most, a, of_label, where, members, power = memory
    powers = ZERO
    for r in range(len(label)):
        y, size[r], u[r] = label[r], INVALID, 1.0
        if share[r] == 0:
            size[r], of_label[r] = CERTAIN, 0
        if share[r] == 0 or not 0 <= y < n:
            continue
        blocks.pad(s[r, :n], x)
        of_label[r], x[y] = x[y], -np.inf
        size[r], a[r], u[r], most[r] = split(x, k, k, LIMIT, theta, space, odds[r], members[r], where[r])
        if np.isnan(of_label[r]):
            size[r] = INVALID
        if size[r] >= 0:
            count = power_sums(odds[r], most[r], power, scratch)
            for j in range(count):
                P[j, r] = power[j]
            powers = max(powers, count)
        else:
            u[r] = 1.0
    return powers


@borrowing
def _write_rows(label, share, alpha, k, theta, tau, value, gradient, memory, before, in_top):
    """Write the losses and gradients of rows from the polynomials of :func:`polynomial.top_group`."""
    _, _, odds, scratch, c, size, u, most, a, of_label, where, _, _ = memory
    for r in range(len(label)):
        w, y = odds[r], label[r]
        if size[r] < 0:
            value[r] = np.nan if size[r] == INVALID else np.inf if of_label[r] == -np.inf else 0.0
            blocks.fill(gradient[r], np.float32(np.nan if size[r] == INVALID else 0.0))
            continue
        rho = polynomial.balanced(before, len(in_top), r, c)
        margin = np.float64(of_label[r]) - np.float64(a[r]) + theta * math.log(u[r] * rho)
        cost, slope = passes.hinge(margin, alpha[y if len(alpha) > 1 else 0], 1 / k, tau)
        value[r], slope = share[r] * cost, share[r] * slope
        passes.label_gradient(w, c, np.float32(u[r] * rho), np.float32(slope), passes.reach(most[r] * rho, k), scratch)
        for j in range(size[r]):
            w[where[r, j]] = slope * in_top[j, r]
        w[y] = slope
        for i in range(gradient.shape[1]):
            gradient[r, i] = w[i]
