"""Compiled bodies that threads run: the passes over the rows of a call, one for each precision.

Bodies of the smooth top-k SVM read the job of a loss of rows, those of the operator the job of backend.py.
"""
# pyright: reportCallIssue=false, reportArgumentType=false
# numba's intrinsics are called without their first parameter

import numpy as np
import torch

from topk_registry.ops.cpu import blocks
from topk_registry.ops.cpu.functions import entry
from topk_registry.ops.cpu.jobs import spans
from topk_registry.ops.cpu.memory import array, empty, zeros
from topk_registry.ops.cpu.numbers import compiled
from topk_registry.ops.ksubset.numba import expected, kernels, large, large_hinges, large_margins
from topk_registry.ops.ksubset.numba.chunk_rows import gradient_rows, state_rows
from topk_registry.ops.rows.numba.batch import batch_of, massless
from topk_registry.ops.rows.numba.job import IGNORED, NUMBERS, PITCH, ROWS_AT_ONCE, G, Q, S

K, THETA, SCALE, TAU = range(4)  # the numbers of the loss
ALPHA, GAPS = range(2)  # its operands: the required gaps, and how many there are
STORED = torch.float32, torch.bfloat16, torch.float64  # scores that the passes over a loss read


@compiled
def operands(job, tensors):
    """Read a job of backend.py: the sizes, and the addresses of the tensors."""
    _, B, n, k, block = array(job, 5, np.int64)
    return B, n, k, block, array(job, 6, np.float64)[5], array(job, 6 + tensors, np.int64)[6:]


@entry()
def label_margins(precision):
    """The margin of each row's label with its gradient."""
    return _label_margins(precision, kernels.label_memory, kernels.label_rows)


@entry()
def label_margins_of_large_k(precision):
    """:func:`label_margins` for large k."""
    return _label_margins(precision, large.label_memory, large.label_rows)


def _label_margins(precision, memory_of, label_rows):
    real = precision.real

    def body(job):
        B, n, k, block, theta, address = operands(job, 4)
        s, gradient = array(address[0], (B, n), real), array(address[3], (B, n), real)
        label, margin = array(address[1], B, np.int64), array(address[2], B, np.float64)
        memory, no_hinge, unused = memory_of(block, n, k, real), empty(0), empty(block)
        for i, j in spans(job, block, B):
            at = s[i:j], False, label[i:j], k, theta, margin[i:j], gradient[i:j]
            label_rows(*at, no_hinge, 1.0, 1.0, unused, unused, memory)

    return body


@entry()
def margins(precision):
    """The margins of every class."""
    return _margins(precision, precision.real, kernels.both_memory, kernels.margin_rows)


@entry()
def margins_of_large_k(precision):
    """:func:`margins` for large k, in double precision whatever that of the scores."""
    return _margins(precision, np.float64, large_margins.row_memory, large_margins.margin_rows)


def _margins(precision, computed, memory_of, margin_rows):
    real = precision.real

    def body(job):
        B, n, k, block, theta, address = operands(job, 2)
        s, out = array(address[0], (B, n), real), array(address[1], (B, n), real)
        memory = memory_of(block, n, k, computed)
        for i, j in spans(job, block, B):
            margin_rows(s[i:j], k, theta, out[i:j], memory)

    return body


@entry()
def margins_backward(precision):
    """The vector-Jacobian product of :func:`margins`."""
    return _margins_backward(precision, precision.real, kernels.both_memory, kernels.margin_rows_backward)


@entry()
def margins_backward_of_large_k(precision):
    """:func:`margins_backward` for large k."""
    return _margins_backward(precision, np.float64, large_margins.row_memory, large_margins.margin_rows_backward)


def _margins_backward(precision, computed, memory_of, margin_rows_backward):
    real = precision.real

    def body(job):
        B, n, k, block, theta, address = operands(job, 3)
        s, g, out = array(address[0], (B, n), real), array(address[1], (B, n), real), array(address[2], (B, n), real)
        memory = memory_of(block, n, k, computed)
        for i, j in spans(job, block, B):
            margin_rows_backward(g[i:j], s[i:j], k, theta, out[i:j], memory)

    return body


@entry()
def chunk_state(precision):
    """The state of a chunk of classes."""
    real = precision.real

    def body(job):
        B, n, k, block, theta, address = operands(job, 4)
        T = min(2 * k + 1, n)
        s, top = array(address[0], (B, n), real), array(address[1], (B, T), real)
        where, P = array(address[2], (B, T), np.int64), array(address[3], (B, k), np.float64)
        for i, j in spans(job, block, B):
            state_rows(s[i:j], k, theta, top[i:j], where[i:j], P[i:j])

    return body


@entry()
def chunk_gradient(precision):
    """The gradient of a chunk of classes."""
    real = precision.real

    def body(job):
        B, n, k, block, theta, address = operands(job, 9)
        s, out = array(address[0], (B, n), real), array(address[8], (B, n), real)
        width = array(address[1], 1, np.int64)[0]
        classes, values = array(address[2], (B, width), np.int64), array(address[3], (B, width), real)
        a, scale, g = array(address[4], B, real), array(address[5], B, real), array(address[6], B, real)
        c = array(address[7], (B, k + 1), real)
        for i, j in spans(job, block, B):
            gradient_rows(s[i:j], theta, classes[i:j], values[i:j], a[i:j], scale[i:j], g[i:j], c[i:j], out[i:j])

    return body


@entry(dtypes=STORED)
def losses_of_labels(precision):
    """The smooth top-k SVM of rows that each have one label; a call with labels compiles nothing for distributions."""
    return _losses_of_labels(precision, kernels.label_memory, kernels.label_rows)


@entry(dtypes=STORED)
def losses_of_labels_of_large_k(precision):
    """:func:`losses_of_labels` for large k."""
    return _losses_of_labels(precision, large.label_memory, large.label_rows)


def _losses_of_labels(precision, memory_of, label_rows):
    stored, real, _, is_bfloat16 = precision

    def body(job):
        batch = batch_of(job)
        if batch.factor < 0:
            return
        s, gradient, alpha, k, theta, scale, tau = read_hinge(batch, stored)
        n, block, losses = batch.classes, batch.field[ROWS_AT_ONCE], batch.losses
        label, weight = batch.label, batch.weight
        ignored, memory = zeros(block, np.bool_), memory_of(block, n, k, real)
        margin, place, factors = empty(block), empty(block, np.int64), empty(block)
        for i, j in spans(job, block, batch.size):
            for r in range(j - i):
                ignored[r] = label[i + r] == batch.field[IGNORED]
                place[r] = 0 if ignored[r] else label[i + r]
                factors[r] = batch.factor * (weight[place[r]] if len(weight) else 1.0)
            at = s[i:j], is_bfloat16, place, k, theta, margin, gradient[i:j]
            label_rows(*at, alpha, scale, tau, factors, losses[i:j], memory)
            forget(ignored, losses[i:j], gradient[i:j])

    return body


@entry(dtypes=STORED)
def losses_of_targets(precision):
    """The smooth top-k SVM of rows with targets of any other kind, smoothed labels among them."""
    return _losses_of_targets(precision, expected.hinge_memory, expected.hinge_rows)


@entry(dtypes=STORED)
def losses_of_targets_of_large_k(precision):
    """:func:`losses_of_targets` for large k."""
    # in double precision division leaves errors of 1e-13 of the largest cotangent
    way = expected if precision.real == np.float64 else large_hinges
    return _losses_of_targets(precision, way.hinge_memory, way.hinge_rows)


@entry(dtypes=(torch.float64,))
def losses_of_targets_of_largest_k(precision):
    """:func:`losses_of_targets` for k that need double precision, whatever that of the scores."""
    return _losses_of_targets(precision, large_hinges.hinge_memory, large_hinges.hinge_rows)


def _losses_of_targets(precision, memory_of, hinge_rows):
    stored, real, _, is_bfloat16 = precision

    def body(job):
        batch = batch_of(job)
        if batch.factor < 0:
            return
        s, gradient, alpha, k, theta, scale, tau = read_hinge(batch, stored)
        B, n, block, dense, several = batch.size, batch.classes, batch.field[ROWS_AT_ONCE], batch.dense, batch.several
        label, even, smoothing, losses = batch.label, batch.uniform, batch.smoothing, batch.losses
        q = array(batch.field[Q], (B if dense else 0, n), real)
        ignored = zeros(block, np.bool_)
        memory = memory_of(block, n, k, real, alpha, tau)
        known = zeros((0 if dense else block, max(several, 1)), np.int64)
        shares = empty(known.shape, real)
        uniform = empty(block if smoothing != 0 or len(even) else 0, real)
        for i, j in spans(job, block, B):
            for r in range(0 if dense else j - i):
                if several > 0:
                    of_mixture(i + r, several, label, batch.share, even, r, known, shares, uniform, ignored)
                else:
                    ignored[r] = label[i + r] == batch.field[IGNORED]
                    known[r, 0] = 0 if ignored[r] else label[i + r]
                    shares[r, 0] = 0.0 if ignored[r] else 1 - smoothing
                    uniform[r] = 0.0 if ignored[r] else smoothing
            hinge_rows(
                s[i:j], is_bfloat16, q[i:j], known, shares, uniform, batch.weight, alpha, batch.factor, k, theta,
                scale, tau, losses[i:j], gradient[i:j], memory,
            )  # fmt: skip
            forget(ignored, losses[i:j], gradient[i:j])

    return body


@compiled
def read_hinge(batch, stored):
    """The scores, the gradient to write, the required gaps, k, the temperature, and scale and tau of the hinge."""
    field, number = batch.field, array(batch.field[NUMBERS], 4, np.float64)
    s, gradient = (
        array(field[S], (batch.size, field[PITCH]), stored),
        array(field[G], (batch.size, batch.classes), stored),
    )
    alpha = array(batch.operands[ALPHA], batch.operands[GAPS], np.float64)
    return s, gradient, alpha, np.int64(number[K]), number[THETA], number[SCALE], number[TAU]


@compiled
def of_mixture(b, few, label, share, even, r, known, shares, uniform, ignored):
    """Row r <- the labels and shares of row b of the batch, and whether it has no mass."""
    own = share[b * few : (b + 1) * few]
    ignored[r] = massless(own, even[b] if len(even) else 0.0)
    for j in range(few):
        known[r, j] = label[b * few + j]
        shares[r, j] = own[j]
    if len(even):
        uniform[r] = even[b]


@compiled
def forget(ignored, losses, gradient):
    """Rows that are ignored cost nothing, whatever their scores."""
    for r in range(len(losses)):
        if ignored[r]:
            losses[r] = 0.0
            blocks.fill(gradient[r], gradient.dtype.type(0))
