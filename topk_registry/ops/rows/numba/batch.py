"""The passes over a batch of rows: targets to masses, the kernel of each row, and the sum of the losses.

See job.py for the memory that they read, and backend.py for the call.
"""
# pyright: reportCallIssue=false, reportArgumentType=false
# numba's intrinsics are called without their first parameter

from collections import namedtuple

import numpy as np

from topk_registry.ops.cpu import storage
from topk_registry.ops.cpu.blocks import total_of
from topk_registry.ops.cpu.functions import PRECISIONS, entry
from topk_registry.ops.cpu.jobs import spans
from topk_registry.ops.cpu.memory import address_of, array, empty
from topk_registry.ops.cpu.numbers import compiled
from topk_registry.ops.rows.numba.job import (
    CLASSES,
    EACH,
    FIELDS,
    IGNORED,
    KERNEL,
    LABEL,
    LABEL_OUT_OF_RANGE,
    MEAN,
    NONE,
    NOT_FINITE,
    NUMBERS,
    OPERANDS,
    PITCH,
    REDUCTION,
    ROWS_AT_ONCE,
    SHARES,
    SIZE,
    SMOOTHING,
    STATUS,
    UNIFORM,
    VALUE,
    WEIGHT,
    G,
    Q,
    S,
)
from topk_registry.ops.rows.numba.row import ROOMS, call_row

# A batch as kernels read it: the fields of the job, the addresses of its operands, labels and shares [B * several] and
# uniform [B] of a mixture, labels [B], or none where the target is ``dense``; the weights [n] or none; the losses [B];
# and the factor of all of them, -1 where a label is out of range.
Batch = namedtuple(
    "Batch", "field operands size classes dense several label share uniform weight losses smoothing factor"
)


@compiled
def batch_of(job):
    """Read a job; its status says where a label is out of range."""
    field, smoothing = array(job, FIELDS, np.int64), array(job, FIELDS, np.float64)[SMOOTHING]
    B, n, dense, several, count = field[SIZE], field[CLASSES], field[Q] != 0, field[EACH], field[OPERANDS]
    label = array(field[LABEL], B * max(several, 1) * (not dense), np.int64)
    share = array(field[SHARES], B * several, np.float64)
    uniform = array(field[UNIFORM], B if field[UNIFORM] != 0 else 0, np.float64)
    weight = array(field[WEIGHT], n if field[WEIGHT] != 0 else 0, np.float64)
    operands = array(job, FIELDS + count, np.int64)[FIELDS:]
    losses = array(job, FIELDS + count + B, np.float64)[FIELDS + count :]
    total = counted(label, weight, n, field[IGNORED], B, dense, several)
    if total < 0:
        field[STATUS] = LABEL_OUT_OF_RANGE
    factor = -1.0 if total < 0 else 1.0 if field[REDUCTION] != MEAN else 1 / total if total > 0 else 0.0
    return Batch(field, operands, B, n, dense, several, label, share, uniform, weight, losses, smoothing, factor)


@entry(dtypes=tuple(PRECISIONS))
def rows(precision):
    """The pass over the rows: each by the kernel whose address is in the job."""
    return _rows(precision, False)


@entry(dtypes=tuple(PRECISIONS))
def rows_of_labels(precision):
    """:func:`rows` of a batch with labels and no smoothing."""
    return _rows(precision, True)


def _rows(precision, labels):
    stored, real, half, is_bfloat16 = precision
    width = np.dtype(real).itemsize
    size, of_gradient = 2 if half else width, 2 if is_bfloat16 else width

    def body(job):
        batch = batch_of(job)
        if batch.factor < 0:
            return
        field, n, label, uniform, factor = batch.field, batch.classes, batch.label, batch.uniform, batch.factor
        weight, several, pitch, keep = batch.weight, batch.several, field[PITCH], field[G] != 0
        kernel, numbers, operands, losses = field[KERNEL], field[NUMBERS], address_of(batch.operands), batch.losses
        room, m, wide, slope = empty(ROOMS * n + 1, real), empty(n, real), empty(n, real), empty(n, real)
        room[ROOMS * n] = 0
        for start, stop in spans(job, field[ROWS_AT_ONCE], batch.size):
            for b in range(start, stop):
                if half:
                    place = address_of(wide)
                    storage.widen(array(field[S] + b * pitch * size, n, stored), is_bfloat16, wide)
                else:
                    place = field[S] + b * pitch * size
                out = field[G] + b * n * of_gradient if keep and not is_bfloat16 else address_of(slope)
                y, mass, ignored = np.int64(-1), 0.0, False
                if labels:
                    ignored = label[b] == field[IGNORED]
                    if not ignored:
                        y, mass = label[b], factor * (weight[label[b]] if len(weight) else 1.0)
                elif batch.dense:
                    q = array(field[Q] + b * n * width, n, real)
                    mass = of_distribution(q, weight, batch.smoothing, factor, m)
                elif several > 0:
                    own, shares = label[b * several : (b + 1) * several], batch.share[b * several : (b + 1) * several]
                    even = uniform[b] if len(uniform) else 0.0
                    ignored, y = massless(shares, even), only_label(own, shares, even)
                    mass = of_mixture(own, shares, even, y, weight, factor, m)
                elif label[b] == field[IGNORED]:
                    ignored = True
                elif batch.smoothing != 0:
                    mass = of_smoothed(label[b], weight, batch.smoothing, factor, m)
                else:
                    y, mass = label[b], factor * (weight[label[b]] if len(weight) else 1.0)
                if ignored:
                    losses[b] = 0.0
                    array(out, n, real)[:] = 0
                else:
                    at = (n, place, address_of(m), y, mass, b, numbers, operands, address_of(room), out)
                    losses[b] = call_row(kernel, at)
                if is_bfloat16 and keep:
                    storage.narrow(array(out, n, real), array(field[G] + b * n * of_gradient, n, stored))

    return body


@entry()
def total(precision):
    """The sum of the losses of the rows, or their mean, whose factor they have."""
    real = precision.real

    def body(job):
        field = array(job, FIELDS, np.int64)
        if field[STATUS] != 0:
            return
        B, n, count = field[SIZE], field[CLASSES], field[OPERANDS]
        dense = field[Q] != 0 or field[EACH] > 0  # a mean of mixtures divides by the number of rows, too
        losses = array(job, FIELDS + count + B, np.float64)[FIELDS + count :]
        value = array(field[VALUE], B if field[REDUCTION] == NONE else 1, real)
        label = array(field[LABEL], 0 if dense else B, np.int64)
        weight = array(field[WEIGHT], n if field[WEIGHT] != 0 else 0, np.float64)
        sum_of_losses = reduce(losses, dense, label, weight, n, field[IGNORED], field[REDUCTION], value)
        if not np.isfinite(sum_of_losses):
            field[STATUS] = NOT_FINITE

    return body


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
