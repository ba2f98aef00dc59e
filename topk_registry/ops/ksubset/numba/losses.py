"""The smooth top-k SVM from the logits to the reduced loss in one call: targets, class weights, ignored rows and
precision, with the gradient. Rows are shared among threads and added up in order, so that results repeat bit for bit.
"""
# pyright: reportCallIssue=false, reportArgumentType=false
# numba's intrinsics are called without their first parameter

import ctypes
import struct
from functools import lru_cache

import numpy as np
import torch
from numba import carray
from torch import Tensor

from topk_registry.ops import openmp as team
from topk_registry.ops.ksubset.numba import backend as cpu
from topk_registry.ops.ksubset.numba import expected, kernels, rows
from topk_registry.ops.ksubset.numba.compiled import compiled
from topk_registry.ops.rows.numba.driver import MEAN, NONE, count, reduce
from topk_registry.ops.tensors import address, laid_out

LABEL_OUT_OF_RANGE, NOT_FINITE = 1, 2  # what may be wrong

# the job: a counter, then these, then the losses of the rows; from THETA on they are float64, before int64
_, SIZE, CLASSES, K, STEP, STRIDE, S, G, VALUE, LABEL, Q, WEIGHT, ALPHA, GAIN, GAPS, IGNORED, REDUCTION = range(17)
STATUS, THETA, SCALE, TAU, SMOOTHING, FIELDS = range(17, 23)
LAYOUT = struct.Struct(f"={THETA}q{FIELDS - THETA}d")
NUMBER = struct.Struct("=q")


class Plan:
    """The loss of logits of one shape, strides and dtype.

    Args:
        scores: logits like those of the calls to come, in single precision or bfloat16. All is computed in single.
        alpha: required gaps, one or [n].
    """

    def __init__(self, scores: Tensor, k: int, tau: float, alpha: Tensor) -> None:
        (B, n), stride = scores.shape, scores.stride(0)
        # below this the loss no longer depends on tau, but its reciprocal would overflow
        tau = max(tau, 4 * torch.finfo(torch.float32).tiny)
        self.steps = cpu.steps_of(B, n, k)
        self.job = ctypes.c_char * (8 * (FIELDS + B))
        self.sizes, self.numbers = (B, n, k), (float(k * tau), 1 / k, float(tau))
        self.as_it_is = scores.stride(1) == 1 and stride >= n
        self.stride = stride if self.as_it_is else n
        alpha = alpha.to("cpu", torch.float32).contiguous()
        gain = torch.exp(-alpha / tau)
        self.gaps, self.gap_sizes = (alpha, gain), (address(alpha), address(gain), alpha.numel())
        self.bodies = bodies(scores.dtype)

    def run(
        self,
        scores: Tensor,
        target: Tensor,
        weight: Tensor | None,
        smoothing: float,
        ignore_index: int,
        reduction: int,
        in_place: bool = False,
    ) -> tuple[Tensor, Tensor, int]:
        """The losses or their sum or mean, the gradient, and what is wrong, 0 for nothing.

        Args:
            target: int64 labels [B], or a distribution [B, n].
            weight: a factor a class [n].
            reduction: a place in :data:`topk_registry.ops.rows.api.REDUCTIONS`.
            in_place: whether the gradient may take the place of the scores.
        """
        B = self.sizes[0]
        scores = (scores if self.as_it_is else scores.contiguous()).resolve_neg()
        dense = target.is_floating_point()
        target = laid_out(target, torch.float32 if dense else torch.int64)
        label, q = (0, address(target)) if dense else (address(target), 0)
        weight = None if weight is None else laid_out(weight, torch.float32)
        # a row is copied before its gradient is written
        gradient = scores if in_place else torch.empty_like(scores, memory_format=torch.contiguous_format)
        value = torch.empty((B,) if reduction == NONE else (), dtype=torch.float32)
        threads, step = cpu.threads_and_step(self.steps, *self.sizes)
        first = scores if B == 0 or scores.is_contiguous() else scores[0]  # its address is that of the first row
        job = self.job()
        # fmt: off
        LAYOUT.pack_into(
            job, 0,
            0, *self.sizes, step, self.stride, address(first), address(gradient), address(value),
            label, q, 0 if weight is None else address(weight), *self.gap_sizes,
            ignore_index, reduction, 0, *self.numbers, smoothing,
        )
        # fmt: on
        of_rows, add_up = self.bodies
        team.start(of_rows, job, threads)
        add_up(job)
        return value, gradient, NUMBER.unpack_from(job, 8 * STATUS)[0]


@lru_cache(maxsize=2)
def bodies(stored: torch.dtype) -> tuple[team.Body, team.Body]:
    """The pass over rows, and the sum of their losses."""
    real, edition, brain = np.float32, team.edition(), stored == torch.bfloat16
    kind = np.uint16 if brain else real

    @team.compiled
    def of_rows(job):
        assert edition  # part of the cache's key: numba does not see that other files have changed
        field, number = carray(job, FIELDS, np.int64), carray(job, FIELDS, np.float64)
        B, n, k, dense = field[SIZE], field[CLASSES], field[K], field[Q] != 0
        s, gradient = cpu.array(field[S], (B, field[STRIDE]), kind), cpu.array(field[G], (B, n), kind)
        label, q = (
            cpu.array(field[LABEL], 0 if dense else B, np.int64),
            cpu.array(field[Q], (B if dense else 0, n), real),
        )
        weight = cpu.array(field[WEIGHT], n if field[WEIGHT] != 0 else 0, real)
        alpha, gain = cpu.array(field[ALPHA], field[GAPS], real), cpu.array(field[GAIN], field[GAPS], real)
        losses = carray(job, FIELDS + B, np.float64)[FIELDS:]
        total = np.float64(B) if dense else count(label, weight, n, field[IGNORED])
        if total < 0:
            field[STATUS] = LABEL_OUT_OF_RANGE
            return
        factor = 1.0 if field[REDUCTION] != MEAN else 1 / total if total > 0 else 0.0
        theta, scale, tau, smoothing = number[THETA], number[SCALE], number[TAU], number[SMOOTHING]
        step, ignored = field[STEP], field[IGNORED]
        if dense or smoothing != 0:
            memory = expected.hinge_memory(step, n, k, real, alpha, gain)
            labels, shares = np.empty((0 if dense else step, 1), np.int64), np.empty((0 if dense else step, 1), real)
            uniform = np.empty(0 if dense else step, real)
            for i, j in team.spans(job, step, B):
                for r in range(0 if dense else j - i):
                    kept = label[i + r] != ignored
                    labels[r, 0], shares[r, 0] = label[i + r] if kept else 0, 1 - smoothing if kept else 0.0
                    uniform[r] = smoothing if kept else 0.0
                expected.hinge_rows(
                    s[i:j], brain, q[i:j], labels, shares, uniform, weight, alpha, factor, k, theta, scale, tau,
                    losses[i:j], gradient[i:j], memory,
                )  # fmt: skip
                if not dense:
                    forget_ignored(label[i:j], ignored, losses[i:j], gradient[i:j])
        else:
            of_labels = kernels.label_memory(step, n, k, real)
            margin, slope = np.empty(step), np.empty(step, real)
            known, factors = np.empty(step, np.int64), np.empty(step)
            for i, j in team.spans(job, step, B):
                for r in range(j - i):
                    kept = label[i + r] != ignored
                    known[r] = label[i + r] if kept else 0
                    factors[r] = factor * (np.float64(weight[known[r]]) if len(weight) else 1.0)
                kernels.label_rows(
                    s[i:j], brain, known, k, theta, margin, gradient[i:j], alpha, scale, tau, factors, losses[i:j],
                    slope, of_labels,
                )  # fmt: skip
                forget_ignored(label[i:j], ignored, losses[i:j], gradient[i:j])

    @team.compiled
    def add_up(job):
        assert edition  # as above
        field = carray(job, FIELDS, np.int64)
        B, n, dense = field[SIZE], field[CLASSES], field[Q] != 0
        losses = carray(job, FIELDS + B, np.float64)[FIELDS:]
        value = cpu.array(field[VALUE], B if field[REDUCTION] == NONE else 1, real)
        if field[STATUS] != 0:
            return
        label = cpu.array(field[LABEL], 0 if dense else B, np.int64)
        weight = cpu.array(field[WEIGHT], n if field[WEIGHT] != 0 else 0, real)
        total = reduce(losses, dense, label, weight, n, field[IGNORED], field[REDUCTION], value)
        if not np.isfinite(total):
            field[STATUS] = NOT_FINITE

    return of_rows, add_up


@compiled
def forget_ignored(label, ignored, losses, gradient):
    """Rows that are ignored cost nothing, whatever their scores."""
    for r in range(len(label)):
        if label[r] == ignored:
            losses[r] = 0.0
            rows.clear(gradient[r])
