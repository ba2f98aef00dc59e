"""The smooth top-k SVM from the logits to the reduced loss in one call: targets, class weights, ignored rows and
precision, with the gradient. Rows are shared among threads and added up in order, so that results repeat bit for bit.
"""
# pyright: reportCallIssue=false, reportArgumentType=false
# numba's intrinsics are called without their first parameter

import ctypes
import math
import struct
from functools import lru_cache

import numpy as np
import torch
from numba import carray
from torch import Tensor

from topk_registry.ops.cpu import blocks
from topk_registry.ops.cpu import openmp as team
from topk_registry.ops.cpu.numbers import compiled
from topk_registry.ops.ksubset.numba import backend as cpu
from topk_registry.ops.ksubset.numba import expected, kernels
from topk_registry.ops.rows.numba.driver import MEAN, NONE, counted, massless, reduce
from topk_registry.ops.targets.label_mixture import LabelMixture
from topk_registry.ops.tensors import address, laid_out

LABEL_OUT_OF_RANGE, NOT_FINITE = 1, 2  # what may be wrong

# the job: a counter, then these, then the losses of the rows; from THETA on they are float64, before int64
_, SIZE, CLASSES, K, STEP, STRIDE, S, G, VALUE, LABEL, Q, SHARES, UNIFORM, EACH, WEIGHT, ALPHA, GAPS = range(17)
IGNORED, REDUCTION, STATUS, THETA, SCALE, TAU, SMOOTHING, FIELDS = range(17, 25)
LAYOUT = struct.Struct(f"={THETA}q{FIELDS - THETA}d")
NUMBER = struct.Struct("=q")


class Plan:
    """The loss of logits of one shape, strides and dtype.

    Args:
        scores: logits like those of the calls to come, in single precision or bfloat16. All is computed in single.
    """

    def __init__(self, scores: Tensor, k: int, tau: float) -> None:
        (B, n), stride = scores.shape, scores.stride(0)
        # below this the loss no longer depends on tau, but its reciprocal would overflow
        tau = max(tau, 4 * torch.finfo(torch.float32).tiny)
        self.steps = cpu.steps_of(B, n, k)
        self.job = ctypes.c_char * (8 * (FIELDS + B))
        self.sizes, self.numbers = (B, n, k), (float(k * tau), 1 / k, float(tau))
        self.as_it_is = scores.stride(1) == 1 and stride >= n
        self.stride = stride if self.as_it_is else n
        self.stored = scores.dtype

    def run(
        self,
        scores: Tensor,
        alpha: Tensor,
        target: Tensor | LabelMixture,
        weight: Tensor | None,
        smoothing: float,
        ignore_index: int,
        reduction: int,
        in_place: bool = False,
    ) -> tuple[Tensor, Tensor, int]:
        """The losses or their sum or mean, the gradient, and what is wrong, 0 for nothing.

        Args:
            alpha: required gaps, one or [n], contiguous float64.
            target: int64 labels [B], a distribution [B, n], or a mixture of labels without a smoothing of its own.
            weight: a factor a class [n].
            reduction: a place in :data:`topk_registry.ops.rows.api.REDUCTIONS`.
            in_place: whether the gradient may take the place of the scores.
        """
        B = self.sizes[0]
        scores = (scores if self.as_it_is else scores.contiguous()).resolve_neg()
        if isinstance(target, LabelMixture):
            target, plain = target.in_memory(), False
            label, q, several = address(target.labels), 0, target.labels.shape[1]
            shares, uniform = address(target.shares), 0 if target.uniform is None else address(target.uniform)
        else:
            dense, several, shares, uniform = target.is_floating_point(), 0, 0, 0
            target = laid_out(target, torch.float32 if dense else torch.int64)
            label, q = (0, address(target)) if dense else (address(target), 0)
            plain = not dense and smoothing == 0
        weight = None if weight is None else laid_out(weight, torch.float64)
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
            label, q, shares, uniform, several, 0 if weight is None else address(weight), address(alpha),
            alpha.numel(),
            ignore_index, reduction, 0, *self.numbers, smoothing,
        )
        # fmt: on
        of_rows = of_labels if plain else of_distributions
        team.start(of_rows(self.stored), job, threads)
        add_up()(job)
        return value, gradient, NUMBER.unpack_from(job, 8 * STATUS)[0]


@lru_cache(maxsize=2)
def of_labels(stored: torch.dtype) -> team.Body:
    """The pass over rows that each have one label; a call with labels compiles nothing for distributions."""
    real, edition, brain = np.float32, team.edition(), stored == torch.bfloat16
    kind = np.uint16 if brain else real

    @team.compiled
    def of_rows(job):
        assert edition  # part of the cache's key: numba does not see that other files have changed
        field, number = carray(job, FIELDS, np.int64), carray(job, FIELDS, np.float64)
        B, n, k, step = field[SIZE], field[CLASSES], field[K], field[STEP]
        s, gradient = cpu.array(field[S], (B, field[STRIDE]), kind), cpu.array(field[G], (B, n), kind)
        label = cpu.array(field[LABEL], B, np.int64)
        weight = cpu.array(field[WEIGHT], n if field[WEIGHT] != 0 else 0, np.float64)
        alpha = cpu.array(field[ALPHA], field[GAPS], np.float64)
        losses = carray(job, FIELDS + B, np.float64)[FIELDS:]
        total = counted(label, weight, n, field[IGNORED], B, False, 0)
        if total < 0:
            field[STATUS] = LABEL_OUT_OF_RANGE
            return
        factor = 1.0 if field[REDUCTION] != MEAN else 1 / total if total > 0 else 0.0
        theta, scale, tau = number[THETA], number[SCALE], number[TAU]
        ignored, memory = np.zeros(step, np.bool_), kernels.label_memory(step, n, k, real)
        margin, slope = np.empty(step), np.empty(step, real)
        place, factors = np.empty(step, np.int64), np.empty(step)
        for i, j in team.spans(job, step, B):
            for r in range(j - i):
                ignored[r] = label[i + r] == field[IGNORED]
                place[r] = 0 if ignored[r] else label[i + r]
                factors[r] = factor * (np.float64(weight[place[r]]) if len(weight) else 1.0)
            kernels.label_rows(
                s[i:j], brain, place, k, theta, margin, gradient[i:j], alpha, scale, tau, factors, losses[i:j],
                slope, memory,
            )  # fmt: skip
            forget(ignored, losses[i:j], gradient[i:j])

    return of_rows


@lru_cache(maxsize=2)
def of_distributions(stored: torch.dtype) -> team.Body:
    """The pass over rows with targets of any other kind, smoothed labels among them."""
    real, edition, brain = np.float32, team.edition(), stored == torch.bfloat16
    kind = np.uint16 if brain else real

    @team.compiled
    def of_rows(job):
        assert edition  # as above
        field, number = carray(job, FIELDS, np.int64), carray(job, FIELDS, np.float64)
        B, n, k, dense, few = field[SIZE], field[CLASSES], field[K], field[Q] != 0, field[EACH]
        s, gradient = cpu.array(field[S], (B, field[STRIDE]), kind), cpu.array(field[G], (B, n), kind)
        label, q = (
            cpu.array(field[LABEL], B * max(few, 1) * (not dense), np.int64),
            cpu.array(field[Q], (B if dense else 0, n), real),
        )
        share = cpu.array(field[SHARES], B * few, np.float64)
        even = cpu.array(field[UNIFORM], B if field[UNIFORM] != 0 else 0, np.float64)
        weight = cpu.array(field[WEIGHT], n if field[WEIGHT] != 0 else 0, np.float64)
        alpha = cpu.array(field[ALPHA], field[GAPS], np.float64)
        losses = carray(job, FIELDS + B, np.float64)[FIELDS:]
        total = counted(label, weight, n, field[IGNORED], B, dense, few)
        if total < 0:
            field[STATUS] = LABEL_OUT_OF_RANGE
            return
        factor = 1.0 if field[REDUCTION] != MEAN else 1 / total if total > 0 else 0.0
        theta, scale, tau, smoothing = number[THETA], number[SCALE], number[TAU], number[SMOOTHING]
        step = field[STEP]
        ignored = np.zeros(step, np.bool_)
        memory = expected.hinge_memory(step, n, k, real, alpha, gains(alpha, tau))
        known = np.zeros((0 if dense else step, max(few, 1)), np.int64)
        shares = np.empty(known.shape, real)
        uniform = np.empty(step if smoothing != 0 or len(even) else 0, real)
        for i, j in team.spans(job, step, B):
            for r in range(0 if dense else j - i):
                if few > 0:
                    of_mixture(i + r, few, label, share, even, r, known, shares, uniform, ignored)
                else:
                    ignored[r] = label[i + r] == field[IGNORED]
                    known[r, 0] = 0 if ignored[r] else label[i + r]
                    shares[r, 0] = 0.0 if ignored[r] else 1 - smoothing
                    uniform[r] = 0.0 if ignored[r] else smoothing
            expected.hinge_rows(
                s[i:j], brain, q[i:j], known, shares, uniform, weight, alpha, factor, k, theta, scale, tau,
                losses[i:j], gradient[i:j], memory,
            )  # fmt: skip
            forget(ignored, losses[i:j], gradient[i:j])

    return of_rows


@lru_cache(maxsize=1)
def add_up() -> team.Body:
    """The sum of the losses of the rows."""
    real, edition = np.float32, team.edition()

    @team.compiled
    def of_job(job):
        assert edition  # as above
        field = carray(job, FIELDS, np.int64)
        B, n = field[SIZE], field[CLASSES]
        dense = field[Q] != 0 or field[EACH] > 0  # a mean of mixtures divides by the number of rows, too
        losses = carray(job, FIELDS + B, np.float64)[FIELDS:]
        value = cpu.array(field[VALUE], B if field[REDUCTION] == NONE else 1, real)
        if field[STATUS] != 0:
            return
        label = cpu.array(field[LABEL], 0 if dense else B, np.int64)
        weight = cpu.array(field[WEIGHT], n if field[WEIGHT] != 0 else 0, np.float64)
        total = reduce(losses, dense, label, weight, n, field[IGNORED], field[REDUCTION], value)
        if not np.isfinite(total):
            field[STATUS] = NOT_FINITE

    return of_job


@compiled
def gains(alpha, tau):
    """exp(-alpha / tau)."""
    found = np.empty(len(alpha))
    for i in range(len(alpha)):
        found[i] = math.exp(-alpha[i] / tau)
    return found


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
            blocks.clear(gradient[r])
