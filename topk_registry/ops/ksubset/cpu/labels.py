"""Smooth top-k losses and their gradients on the CPU, in single precision and for k up to 64, compiled by numba.

../README.md defines the terms. The rows of a batch are divided among several threads. The result of a row
depends neither on the other rows nor on the thread that computes the row.
"""
# pyright: reportCallIssue=false, reportArgumentType=false

import math
from collections import namedtuple
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from topk_registry.ops.backend import laid_out
from topk_registry.ops.cpu import blocks
from topk_registry.ops.cpu.driver import add_up, kernel, spans
from topk_registry.ops.cpu.memory import array, borrowed
from topk_registry.ops.cpu.numbers import ZERO, borrowing, compiled, largest_integer
from topk_registry.ops.ksubset.cpu import loops, polynomial
from topk_registry.ops.ksubset.cpu import masses as mass_rows
from topk_registry.ops.ksubset.cpu.split import CERTAIN, INVALID, power_sums, scratch_space, split
from topk_registry.ops.masses import Masses

LARGEST_K = 64
LIMIT = 1 / 2  # classes with larger odds belong to the top group
LEAST_TAU = 4 * torch.finfo(torch.float32).tiny  # has a finite reciprocal; losses already equal their limit at tau = 0
LEAST_WORK = 1 << 14  # a further thread is used only for at least this many steps, about 20 microseconds of work
ROWS_AT_ONCE = 16  # maximum number of rows that a thread takes at a time; vector instructions compute them together
SCORES_AT_ONCE = 1 << 16  # approximate number of scores that a thread takes at a time; these fit in its cache

# Scratch memory of a thread. One row at a time uses space (for split), x (scores), scratch, c (coefficients) and powers
# (power sums). These fields have an entry per row: odds; size, u, most and a (results of split); of_label (score of the
# label); where and members (classes and odds of the top group).
Memory = namedtuple("Memory", "space x odds scratch c size u most a of_label where members powers")


def losses(
    logits: Tensor,
    masses: Masses,
    k: int,
    tau: float,
    alpha: Tensor,
    needs_grad: bool = True,
    sums: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute the smooth top-k loss of each row, and the gradient of the losses with respect to the scores.

    The loss of a row is sum_c q_c tau softplus((alpha_c - m_c / k) / tau). The margin m_c is the score of class c
    minus the k-th largest score of the other classes, smoothed with temperature k tau. The mass q_c is the weight of
    class c in the target of the row.

    Args:
        logits: scores [B, n] on the CPU, with 2k <= n. They are read in single precision.
        masses: the mass q_c of each class c in each row.
        k: as in "k-th largest score", at most LARGEST_K.
        tau: smoothing temperature of the loss.
        alpha: required margin, as one number [] or as one number per class [n].
        needs_grad: unused, because the gradient costs little.
        sums: whether to return the sum of the losses.

    Returns:
        The losses [B] or their sum [], and the gradient [B, n], both in single precision.
    """
    labels, shares, even, dense = masses[:4]
    s = logits.to(torch.float32, memory_format=torch.contiguous_format)
    copied = s is not logits  # then the gradient overwrites the copy
    B, n = s.shape
    pitch, stride = s.stride()
    if stride != 1 or pitch < n or s.is_neg():
        s, pitch = laid_out(s, torch.float32), n
    value = s.new_empty(B)
    gradient = s if copied else s.new_empty(B, n)
    total = s.new_empty(()) if sums else None
    alpha, tau = laid_out(alpha, torch.float64), max(tau, LEAST_TAU)
    m = 0 if labels is None else labels.shape[1]
    labels = None if labels is None else laid_out(labels, torch.int64)
    shares = None if shares is None else laid_out(shares, torch.float64)
    threads, block = _threads_and_block(k, B, n, torch.get_num_threads())
    sizes = B, n, pitch, k, block, m, alpha.numel()
    common = *sizes, float(tau), s, value, gradient, alpha, labels, shares, total
    if m == 1 and even is None and dense is None:
        label_body.run(threads, *common)
    else:
        even = None if even is None else laid_out(even, torch.float64)
        dense = None if dense is None else laid_out(dense, torch.float32)
        mass_body.run(threads, *common, even, dense)
    return value if total is None else total, gradient


@lru_cache(maxsize=1024)
def _threads_and_block(k: int, B: int, n: int, most: int) -> tuple[int, int]:
    polynomials = (2 * k + 3) ** 2
    steps = B * (n + 500 + 2 * polynomials)  # fitted to measured times
    count = max(1, min(most, B, steps // LEAST_WORK))  # number of threads
    return count, max(1, min(ROWS_AT_ONCE, SCORES_AT_ONCE // n, SCORES_AT_ONCE // polynomials, -(-B // count)))


@borrowing
def _read(job):
    # the values of a job are the arguments of run in :func:`losses`, after two counters of rows
    _, _, B, n, pitch, k, block, m, gaps = array(job, 9, np.int64)
    tau, field = array(job, 10, np.float64)[9], array(job, 19, np.int64)
    s, value = array(field[10], (B, pitch), np.float32), array(field[11], B, np.float32)
    gradient, alpha = array(field[12], (B, n), np.float32), array(field[13], gaps, np.float64)
    labels, shares = array(field[14], (B, m), np.int64), array(field[15], (B, m), np.float64)
    total = array(field[16], 1 if field[16] != 0 else 0, np.float32)
    return B, n, k, block, tau, s, value, gradient, alpha, labels, shares, total


@kernel
def label_body(job):  # rows with one label each
    B, n, k, block, tau, s, value, gradient, alpha, labels, shares, total = _read(job)
    memory, done = memory_for(block, n, k), ZERO
    for i, j in spans(job, block, B):
        label_rows(s[i:j], labels[i:j, 0], shares[i:j, 0], alpha, k, k * tau, tau, value[i:j], gradient[i:j], memory)
        done += j - i
    add_up(job, done, value, total)


@kernel
def mass_body(job):  # rows with masses for several classes
    B, n, k, block, tau, s, value, gradient, alpha, labels, shares, total = _read(job)
    field = array(job, 19, np.int64)
    even = array(field[17], B if field[17] != 0 else 0, np.float64)
    dense = array(field[18], (B if field[18] != 0 else 0, n), np.float32)
    memory, done = mass_rows.memory_for(block, n, k, alpha, tau), ZERO
    for i, j in spans(job, block, B):
        mass_rows.mass_rows(
            s[i:j], labels[i:j], shares[i:j], even[i:j], dense[i:j], alpha, k, k * tau, tau, value[i:j],
            gradient[i:j], memory,
        )  # fmt: skip
        done += j - i
    add_up(job, done, value, total)


@compiled
def memory_for(width, n, k):
    """Return the scratch memory for a call of :func:`label_rows` with at most ``width`` rows of n scores."""
    m = blocks.padded(n)
    members = min(3 * k, m)
    return Memory(
        scratch_space(k), np.empty(m, np.float32), np.empty((width, m), np.float32),
        np.empty(blocks.CACHE_BLOCK, np.float32), loops.coefficients(k), np.empty(width, np.int64), np.empty(width),
        np.empty(width), np.empty(width, np.float32), np.empty(width, np.float32), np.empty((width, members), np.int64),
        np.empty((width, members)), np.empty(k),
    )  # fmt: skip


@compiled
def label_rows(s, label, share, alpha, k, theta, tau, value, gradient, memory):
    """Write the losses and the gradients of rows that have one label each.

    If a row has label y, and the label has mass q, the loss of the row is q tau softplus((alpha_y - m_y / k) / tau).
    The margin m_y is the score of the label minus the k-th largest score of the other classes, smoothed with
    temperature theta.

    Args:
        s: scores [B, n or more]. Columns after the first n are ignored.
        label: label of each row [B]. For a label that is not from 0 to n - 1, the row's loss and gradient are NaN.
        share: mass of each label [B]. If the mass is 0, the row's loss and gradient are 0 for any label and scores.
        alpha: required margin of each class [n], or one number for all classes [1].
        k, theta, tau: k as in "k-th largest score"; temperature of the margins, which is k tau; smoothing temperature.
        value, gradient: output, losses [B] and their gradient with respect to the scores [B, n].
        memory: result of :func:`memory_for`.
    """
    B, memory = len(value), borrowed(memory)
    P = np.zeros((k, B))
    powers = _split_rows(s, label, share, k, theta, gradient.shape[1], memory, P)
    T = largest_integer(memory.size[:B])
    p, q, in_top = np.empty((T, B)), np.empty((T, B)), np.empty((T, B))
    before, after = np.empty((T + 1, k + 1, B)), np.empty((T + 1, k + 1, B))
    polynomial.top_group(memory.members, memory.size, memory.u, P, powers, p, q, before, after)
    polynomial.label_gradient(p, q, before, after, in_top)
    _write_rows(label, share, alpha, k, theta, tau, value, gradient, memory, before, in_top)


@borrowing
def _split_rows(s, label, share, k, theta, n, memory, P):
    space, x, odds, scratch, _, size, u, most, a, of_label, where, members, power = memory
    powers = ZERO  # largest number of power sums of a row that are not 0
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
    _, _, odds, scratch, c, size, u, most, a, of_label, where, _, _ = memory
    for r in range(len(label)):
        w, y = odds[r], label[r]
        if size[r] < 0:
            value[r] = np.nan if size[r] == INVALID else np.inf if of_label[r] == -np.inf else 0.0
            blocks.fill(gradient[r], np.float32(np.nan if size[r] == INVALID else 0.0))
            continue
        rho = polynomial.balanced(before, len(in_top), r, c)
        margin = np.float64(of_label[r]) - np.float64(a[r]) + theta * math.log(u[r] * rho)
        cost, slope = loops.hinge(margin, alpha[y if len(alpha) > 1 else 0], 1 / k, tau)
        value[r], slope = share[r] * cost, share[r] * slope
        loops.label_gradient(w, c, np.float32(rho), np.float32(slope), loops.reach(most[r] * rho, k), scratch)
        for j in range(size[r]):
            w[where[r, j]] = slope * in_top[j, r]
        w[y] = slope
        for i in range(gradient.shape[1]):
            gradient[r, i] = w[i]
