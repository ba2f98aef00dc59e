"""The k-subset operator on the CPU, compiled by numba: fewer passes over the scores than torch operations make.

Rows are shared out among threads; nothing in a row depends on another, nor on who works on it.
"""
# pyright: reportCallIssue=false, reportArgumentType=false
# numba's intrinsics are called without their first parameter

from functools import lru_cache

import numpy as np
import torch
from numba import carray
from torch import Tensor

from topk_registry.ops.cpu import openmp as team
from topk_registry.ops.cpu.numbers import compiled
from topk_registry.ops.hinge import Hinge
from topk_registry.ops.ksubset.backends import Kernels
from topk_registry.ops.ksubset.numba import expected
from topk_registry.ops.ksubset.numba import kernels as compiled_kernels
from topk_registry.ops.targets.label_mixture import LabelMixture
from topk_registry.ops.tensors import operand

ALONE = 1 << 14  # steps to a thread at least: about 20 microseconds of work
WIDTH = 16  # rows that a thread takes at a time, at most, for their polynomials to fill vectors
GROUP = 1 << 16  # scores that a thread takes at a time, about: they and the polynomials are to stay in its cache


def label_margins(s: Tensor, label: Tensor, k: int, theta: float) -> tuple[Tensor, Tensor]:
    """The margin theta l_y [B] of each row's label and its gradient to the scores: [B, n], [B] -> [B], [B, n]."""
    s, label = operand(s, s.shape, s.dtype, s.device), operand(label, s.shape[:1], torch.int64, s.device)
    margin, gradient = s.new_empty(s.shape[0], dtype=torch.float64), torch.empty_like(s)
    no_hinge = (None, None, None)
    share(_label_margins(s.dtype), s, k, theta, label, margin, gradient, *no_hinge, numbers=(0, 0.0, 0.0, 0.0))
    return margin, gradient


def label_hinges(
    s: Tensor, label: Tensor, k: int, theta: float, hinge: Hinge, factor: float = 0.0
) -> tuple[Tensor, ...]:
    """:func:`label_margins`, then the hinge's value [B] and slope [B] at the margins.

    With a factor other than 0, value and gradient are those of the hinge times the factor.
    """
    s, label = operand(s, s.shape, s.dtype, s.device), operand(label, s.shape[:1], torch.int64, s.device)
    alpha = operand(hinge.alpha, hinge.alpha.shape, s.dtype, s.device)
    margin, gradient = s.new_empty(s.shape[0], dtype=torch.float64), torch.empty_like(s)
    value, slope = s.new_empty(s.shape[0]), s.new_empty(s.shape[0])
    numbers = (alpha.numel(), hinge.scale, hinge.tau, factor)
    share(_label_margins(s.dtype), s, k, theta, label, margin, gradient, alpha, value, slope, numbers=numbers)
    return margin, gradient, value, slope


def expected_hinges(
    s: Tensor, target: Tensor | LabelMixture, k: int, theta: float, hinge: Hinge, weight: Tensor | None, factor: float
) -> tuple[Tensor, Tensor]:
    """The hinges of a target, weighted, and their gradient: see :mod:`topk_registry.ops.ksubset.soft_targets`."""
    (B, n), real, device = s.shape, s.dtype, s.device
    if weight is None and isinstance(target, Tensor) and not target.is_floating_point():
        _, gradient, value, _ = label_hinges(s, target, k, theta, hinge, factor)
        return value, gradient
    s, alpha = operand(s, s.shape, real, device), operand(hinge.alpha, hinge.alpha.shape, real, device)
    value, gradient = s.new_empty(B), torch.empty_like(s)
    q = labels = shares = uniform = None
    if isinstance(target, LabelMixture):
        labels = operand(target.labels, (B, target.labels.shape[1]), torch.int64, device)
        shares = operand(target.shares.to(real), labels.shape, real, device)
        uniform = None if target.uniform is None else operand(target.uniform.to(real), (B,), real, device)
    elif target.is_floating_point():
        q = operand(target.to(real), (B, n), real, device)
    else:
        labels, shares = operand(target[:, None], (B, 1), torch.int64, device), s.new_ones(B, 1)
    weight = None if weight is None else operand(weight, (n,), real, device)
    gain = torch.exp(-alpha / max(hinge.tau, 4 * torch.finfo(real).tiny))
    few = -1 if labels is None else labels.shape[1]
    sizes = few, uniform is not None, 0 if weight is None else n, alpha.numel()
    tensors = q, labels, shares, uniform, weight, alpha, gain, value, gradient
    share(_expected_hinges(real), s, k, theta, *tensors, numbers=(hinge.scale, hinge.tau, factor, *sizes))
    return value, gradient


def margins(s: Tensor, k: int, theta: float) -> Tensor:
    """The margins theta l of every class: [B, n] -> [B, n]."""
    s = operand(s, s.shape, s.dtype, s.device)
    out = torch.empty_like(s)
    share(_margins(s.dtype), s, k, theta, out)
    return out


def margins_backward(g: Tensor, s: Tensor, k: int, theta: float) -> Tensor:
    """The vector-Jacobian product of :func:`margins`: cotangents g [B, n], scores [B, n] -> [B, n]."""
    s, g = operand(s, s.shape, s.dtype, s.device), operand(g, s.shape, s.dtype, s.device)
    out = torch.empty_like(s)
    share(_margins_backward(s.dtype), s, k, theta, g, out)
    return out


def share(
    body: team.Body, s: Tensor, k: int, theta: float, *tensors: Tensor | None, numbers: tuple[float, ...] = ()
) -> None:
    """Let threads run ``body`` on the rows of s, with the addresses of ``tensors`` (0 for None) and ``numbers``."""
    B, n = s.shape
    threads, step = threads_and_step(steps_of(B, n, k), B, n, k)
    team.run(body, B, n, k, step, float(theta), s, *tensors, *map(float, numbers), threads=threads)


def steps_of(B: int, n: int, k: int) -> int:
    """The work on B rows: over the scores, and what a row costs besides, as measured."""
    return B * (n + 500 + 2 * (2 * k + 3) ** 2)


def threads_and_step(steps: int, B: int, n: int, k: int) -> tuple[int, int]:
    """Return the number of threads that share the rows, and the number of rows that one takes at a time."""
    threads = max(1, min(torch.get_num_threads(), B, steps // ALONE))
    return threads, max(1, min(WIDTH, GROUP // n, GROUP // (2 * k + 3) ** 2, -(-B // threads)))


@compiled
def operands(job, tensors):
    """Read a job of :func:`share`: the sizes, and the addresses of the tensors."""
    _, B, n, k, step = carray(job, 5, np.int64)
    return B, n, k, step, carray(job, 6, np.float64)[5], carray(job, 6 + tensors, np.int64)[6:]


@compiled
def array(address, shape, real):
    return carray(team.pointer(address), shape, real)


@lru_cache(maxsize=2)
def _label_margins(dtype: torch.dtype) -> team.Body:
    real, edition = real_of(dtype), team.edition()

    @team.compiled
    def body(job):
        assert edition  # part of the cache's key: numba does not see that other files have changed
        B, n, k, step, theta, address = operands(job, 7)
        classes, scale, tau, factor = carray(job, 17, np.float64)[13:]
        s, gradient = array(address[0], (B, n), real), array(address[3], (B, n), real)
        label, margin = array(address[1], B, np.int64), array(address[2], B, np.float64)
        gaps = array(address[4], np.int64(classes), real)
        value, slope = array(address[5], B, real), array(address[6], B, real)
        # double precision, as in losses.py: of one kind of arguments the same functions compile once
        alpha, cost = np.empty(len(gaps)), np.empty(step if len(gaps) else 0)
        for c in range(len(gaps)):
            alpha[c] = gaps[c]
        memory, factors = compiled_kernels.label_memory(step, n, k, real), np.full(step if factor != 0 else 0, factor)
        for i, j in team.spans(job, step, B):
            compiled_kernels.label_rows(
                s[i:j], False, label[i:j], k, theta, margin[i:j], gradient[i:j],
                alpha, scale, tau, factors, cost, slope[i:j], memory,
            )  # fmt: skip
            for r in range(j - i if len(gaps) else 0):
                value[i + r] = cost[r]

    return body


@lru_cache(maxsize=2)
def _expected_hinges(dtype: torch.dtype) -> team.Body:
    real, edition = real_of(dtype), team.edition()

    @team.compiled
    def body(job):
        assert edition  # as above
        B, n, k, step, theta, address = operands(job, 10)
        numbers = carray(job, 23, np.float64)[16:]
        scale, tau, factor = numbers[0], numbers[1], numbers[2]
        m, even, weights, classes = (
            np.int64(numbers[3]),
            np.int64(numbers[4]),
            np.int64(numbers[5]),
            np.int64(numbers[6]),
        )
        s, gradient = array(address[0], (B, n), real), array(address[9], (B, n), real)
        q = array(address[1], (B if m < 0 else 0, n), real)
        labels, shares = array(address[2], (B, max(m, 0)), np.int64), array(address[3], (B, max(m, 0)), real)
        uniform, weight = array(address[4], B * even, real), array(address[5], weights, real)
        alpha, gain = array(address[6], classes, real), array(address[7], classes, real)
        value = array(address[8], B, real)
        memory = expected.hinge_memory(step, n, k, real, alpha, gain)
        for i, j in team.spans(job, step, B):
            expected.hinge_rows(
                s[i:j], False, q[i:j], labels[i:j], shares[i:j], uniform[i:j], weight, alpha,
                factor, k, theta, scale, tau, value[i:j], gradient[i:j], memory,
            )  # fmt: skip

    return body


@lru_cache(maxsize=2)
def _margins(dtype: torch.dtype) -> team.Body:
    real, edition = real_of(dtype), team.edition()

    @team.compiled
    def body(job):
        assert edition  # as above
        B, n, k, step, theta, address = operands(job, 2)
        s, out = array(address[0], (B, n), real), array(address[1], (B, n), real)
        memory = compiled_kernels.both_memory(step, n, k, s.dtype)
        for i, j in team.spans(job, step, B):
            compiled_kernels.margin_rows(s[i:j], k, theta, out[i:j], memory)

    return body


@lru_cache(maxsize=2)
def _margins_backward(dtype: torch.dtype) -> team.Body:
    real, edition = real_of(dtype), team.edition()

    @team.compiled
    def body(job):
        assert edition  # as above
        B, n, k, step, theta, address = operands(job, 3)
        s, g, out = array(address[0], (B, n), real), array(address[1], (B, n), real), array(address[2], (B, n), real)
        memory = compiled_kernels.both_memory(step, n, k, s.dtype)
        for i, j in team.spans(job, step, B):
            compiled_kernels.margin_rows_backward(g[i:j], s[i:j], k, theta, out[i:j], memory)

    return body


def real_of(dtype: torch.dtype) -> type:
    return np.float64 if dtype == torch.float64 else np.float32


kernels = Kernels(label_margins, label_hinges, margins, margins_backward, expected_hinges)
