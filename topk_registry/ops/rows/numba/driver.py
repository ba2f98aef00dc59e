"""Run a row kernel over a batch: targets, class weights, ignored rows, reduction and precision, in one call.

A row kernel is a C function, see :data:`ROW`. The driver turns every kind of target into what it takes: a label with a
mass, or a mass for every class. Rows are shared among threads; a row's result does not depend on who works on it, and
the rows are added up in order, so that results repeat bit for bit.
"""
# pyright: reportCallIssue=false, reportArgumentType=false
# numba's intrinsics are called without their first parameter

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numba import carray
from torch import Tensor

from topk_registry.ops.cpu import openmp, storage
from topk_registry.ops.cpu.functions import compiled, function_type, total_of
from topk_registry.ops.rows.backends import Kernels
from topk_registry.ops.targets.label_mixture import LabelMixture

# double row(n, s, m, y, mass, b, numbers, tensors, room, g): the loss of scores s [n], and its gradient in g [n].
# y >= 0: the label, of this mass. y < 0: masses m [n], which add up to ``mass``. b is the row's place in the batch,
# numbers and operands (addresses, of functions and then of tensors) are the kernel's own. room has ROOMS * n numbers to
# work with, and one that is 0 before a thread's first row and then stays as it was left, for a guess that makes the
# next row quicker.
# fmt: off
ROW = function_type(
    "double", "int64", "pointer", "pointer", "int64", "double", "int64", "pointer", "pointer", "pointer", "pointer",
)
# fmt: on
call_row = ROW.call
ROOMS = 6
ALONE = 1 << 13  # scores to a thread at least: about 10 microseconds of work
SPAN = 1 << 14  # scores that a thread takes at a time, about
NONE, MEAN, SUM = range(3)
LABEL_OUT_OF_RANGE = 1

# the job: a counter, then these, then the operands
_, SIZE, CLASSES, PITCH, STEP, KERNEL, S, G, LOSSES, VALUE, LABEL, Q, WEIGHT, NUMBERS, IGNORED = range(15)
REDUCTION, STATUS, SHARES, UNIFORM, EACH, SMOOTHING, FIELDS = range(15, 22)


def run(
    kernel: int,
    s: Tensor,
    target: Tensor | LabelMixture,
    weight: Tensor | None,
    smoothing: float,
    ignore_index: int,
    reduction: int,
    numbers: Tensor | None,
    operands: Sequence[int | Tensor | None],
    want_gradient: bool,
) -> tuple[Tensor, Tensor | None, bool]:
    """The loss, its gradient, and whether all labels are in range.

    Args:
        kernel: the address of a row kernel for the precision of s.
        s: scores [B, n], each row contiguous, in any precision; half precision is computed with in single.
        target: int64 labels [B], masses [B, n] in the precision computed with, or a mixture of labels, whose shares
            are float64; contiguous.
        weight: a factor a class [n], float64; contiguous.
        numbers: the kernel's own numbers, float64.
        operands: addresses of functions that the kernel calls, then its own tensors, contiguous; None for one that it
            does not read.

    The gradient of float16 scores is in float32: the factor that keeps it in range has yet to come.
    """
    B, n = s.shape
    real = torch.float64 if s.dtype == torch.float64 else torch.float32
    value = torch.empty((B,) if reduction == NONE else (), dtype=real)
    gradient = torch.empty((B, n), dtype=real if s.dtype == torch.float16 else s.dtype) if want_gradient else None
    losses = torch.empty(B, dtype=torch.float64)
    threads = max(1, min(torch.get_num_threads(), B, B * n // ALONE))
    step = max(1, min(SPAN // n, -(-B // (4 * threads))))
    label = q = shares = uniform = None
    if isinstance(target, LabelMixture):
        label, shares, uniform = target
    elif target.dtype == torch.int64:
        label = target
    else:
        q = target
    sizes = B, n, s.stride(0), step, kernel
    s = s if B == 0 or s.is_contiguous() else s[0]  # the address of the first row
    several = 0 if shares is None else shares.shape[1]
    options = ignore_index, reduction, 0, shares, uniform, several, float(smoothing)
    job = openmp.job_of(*sizes, s, gradient, losses, value, label, q, weight, numbers, *options, *operands)
    rows, add_up = bodies(s.dtype)
    openmp.start(rows, job, threads)
    add_up(job)
    return value, gradient, ctypes.c_int64.from_buffer(job, 8 * STATUS).value != LABEL_OUT_OF_RANGE


@lru_cache(maxsize=4)
def bodies(dtype: torch.dtype) -> tuple[openmp.Body, openmp.Body]:
    """The pass over rows, and the sum of their losses, for scores of this dtype."""
    edition = openmp.edition()
    half, brain = dtype in (torch.float16, torch.bfloat16), dtype == torch.bfloat16
    real, size = (np.float64, 8) if dtype == torch.float64 else (np.float32, 4)

    @openmp.compiled
    def rows(job):
        assert edition  # part of the cache's key: numba does not see that other files have changed
        field, smoothing = carray(job, FIELDS, np.int64), carray(job, FIELDS, np.float64)[SMOOTHING]
        B, n, kernel, keep, dense = field[SIZE], field[CLASSES], field[KERNEL], field[G] != 0, field[Q] != 0
        pitch, few, operands = field[PITCH], field[EACH], carray(job, FIELDS + 1, np.int64)[FIELDS:].ctypes.data
        label = carray(openmp.pointer(field[LABEL]), B * max(few, 1) * (not dense), np.int64)
        share = carray(openmp.pointer(field[SHARES]), B * few, np.float64)
        uniform = carray(openmp.pointer(field[UNIFORM]), B if field[UNIFORM] != 0 else 0, np.float64)
        weight = carray(openmp.pointer(field[WEIGHT]), n if field[WEIGHT] != 0 else 0, np.float64)
        losses = carray(openmp.pointer(field[LOSSES]), B, np.float64)
        total = counted(label, weight, n, field[IGNORED], B, dense, few)
        if total < 0:
            field[STATUS] = LABEL_OUT_OF_RANGE
            return
        factor = 1.0 if field[REDUCTION] != MEAN else 1 / total if total > 0 else 0.0
        room, m, wide, slope = np.empty(ROOMS * n + 1, real), np.empty(n, real), np.empty(n, real), np.empty(n, real)
        room[ROOMS * n] = 0
        for start, stop in openmp.spans(job, field[STEP], B):
            for b in range(start, stop):
                if half:
                    place = wide.ctypes.data
                    stored = carray(openmp.pointer(field[S] + b * pitch * 2), n, np.uint16)
                    storage.widen(stored, brain, wide)
                else:
                    place = field[S] + b * pitch * size
                out = field[G] + b * n * size if keep and not brain else slope.ctypes.data
                y, mass, ignored = np.int64(-1), 0.0, False
                if dense:
                    q = carray(openmp.pointer(field[Q] + b * n * size), n, real)
                    mass = of_distribution(q, weight, smoothing, factor, m)
                elif few > 0:
                    own, shares = label[b * few : (b + 1) * few], share[b * few : (b + 1) * few]
                    even = uniform[b] if len(uniform) else 0.0
                    ignored, y = massless(shares, even), only_label(own, shares, even)
                    mass = of_mixture(own, shares, even, y, weight, factor, m)
                elif label[b] == field[IGNORED]:
                    ignored = True
                elif smoothing != 0:
                    mass = of_smoothed(label[b], weight, smoothing, factor, m)
                else:
                    y, mass = label[b], factor * (np.float64(weight[label[b]]) if len(weight) else 1.0)
                if ignored:
                    losses[b] = 0.0
                    carray(openmp.pointer(out), n, real)[:] = 0
                else:
                    at = (n, place, m.ctypes.data, y, mass, b, field[NUMBERS], operands, room.ctypes.data, out)
                    losses[b] = call_row(kernel, at)
                if brain and keep:
                    written = carray(openmp.pointer(field[G] + b * n * 2), n, np.uint16)
                    storage.narrow(carray(openmp.pointer(out), n, real), written)

    @openmp.compiled
    def add_up(job):
        assert edition  # as above
        field = carray(job, FIELDS, np.int64)
        B, n, dense = field[SIZE], field[CLASSES], field[Q] != 0
        losses = carray(openmp.pointer(field[LOSSES]), B, np.float64)
        value = carray(openmp.pointer(field[VALUE]), B if field[REDUCTION] == NONE else 1, real)
        dense = dense or field[EACH] > 0  # a mean of mixtures divides by the number of rows, too
        label = carray(openmp.pointer(field[LABEL]), 0 if dense else B, np.int64)
        weight = carray(openmp.pointer(field[WEIGHT]), n if field[WEIGHT] != 0 else 0, np.float64)
        reduce(losses, dense, label, weight, n, field[IGNORED], field[REDUCTION], value)

    return rows, add_up


@compiled
def reduce(losses, dense, label, weight, n, ignore_index, reduction, value):
    """value <- the losses, or their sum or mean, whose factor they have; the sum is returned."""
    total = 0.0
    for b in range(len(losses)):
        total += losses[b]
    if reduction == NONE:
        for b in range(len(losses)):
            value[b] = losses[b]
    else:
        value[0] = total
    if reduction == MEAN:  # of nothing it is NaN, as cross-entropy's
        any_rows = len(losses) > 0 if dense else count(label, weight, n, ignore_index) > 0
        value[0] = total if any_rows else np.nan
    return total


@compiled
def count(label, weight, n, ignore_index):
    """The sum of the labels' weights, by which the mean divides; -1 where a label is out of range."""
    total = 0.0
    for b in range(len(label)):
        y = label[b]
        if y != ignore_index:
            if y < 0 or y >= n:
                return -1.0
            total += np.float64(weight[y]) if len(weight) else 1.0
    return total


@compiled
def counted(label, weight, n, ignore_index, B, dense, few):
    """By what a mean divides; -1 where a label is out of range."""
    if not dense and few == 0:
        return count(label, weight, n, ignore_index)
    for i in range(len(label)):
        if label[i] < 0 or label[i] >= n:
            return -1.0
    return np.float64(B)


@compiled
def of_distribution(q, weight, smoothing, factor, m):
    """Masses m = factor w (q (1 - smoothing) + smoothing / n), and their sum."""
    real = m.dtype.type
    share, spread = real(factor * (1 - smoothing)), real(factor * smoothing / len(m))
    if len(weight):
        for i in range(len(m)):
            m[i] = weight[i] * (share * q[i] + spread)
    else:
        for i in range(len(m)):
            m[i] = share * q[i] + spread
    return total_of(m)


@compiled
def of_smoothed(y, weight, smoothing, factor, m):
    """Masses of a label with a share ``smoothing`` of it spread over all classes, and their sum."""
    real = m.dtype.type
    spread, rest = real(factor * smoothing / len(m)), real(factor * (1 - smoothing))
    if len(weight):
        for i in range(len(m)):
            m[i] = spread * weight[i]
        m[y] += rest * weight[y]
    else:
        m[:] = spread
        m[y] += rest
    return total_of(m)


@compiled
def massless(shares, even):
    """Whether a row of a mixture has no mass."""
    for share in shares:
        if share != 0:
            return False
    return even == 0


@compiled
def only_label(labels, shares, even):
    """The class that has all mass of a row of a mixture, -1 where there are several."""
    y = np.int64(-1)
    if even == 0:
        for i in range(len(labels)):
            if shares[i] != 0 and labels[i] != y:
                if y >= 0:
                    return np.int64(-1)
                y = labels[i]
    return y


@compiled
def of_mixture(labels, shares, even, y, weight, factor, m):
    """The mass of the only label y; where there is none, masses of all classes and their sum."""
    real, total = m.dtype.type, 0.0
    if y >= 0:
        for share in shares:
            total += share
        return factor * total * (np.float64(weight[y]) if len(weight) else 1.0)
    m[:] = real(factor * even / len(m))
    for i in range(len(labels)):
        m[labels[i]] += real(factor * shares[i])
    if len(weight):
        for i in range(len(m)):
            m[i] *= weight[i]
    return total_of(m)


kernels = Kernels(run)
