"""Run a loss of rows over a batch: targets, class weights, ignored rows, reduction and precision, in one call.

A compiled body turns every kind of target into what a kernel takes: a label with a mass, or a mass for every class.
Rows are shared among threads; a row's result does not depend on who works on it, and the rows are added up in order,
so that results repeat bit for bit. Nothing here needs numba: bodies and kernels may come from a library.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache
from struct import Struct
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from topk_registry.ops.cpu import entries, threads
from topk_registry.ops.rows.backends import Own
from topk_registry.ops.rows.numba.job import FIELDS, LABEL_OUT_OF_RANGE, LAYOUT, NONE, STATUS
from topk_registry.ops.targets.checks import check_range
from topk_registry.ops.targets.label_mixture import LabelMixture
from topk_registry.ops.targets.masses import Options
from topk_registry.ops.tensors import DTYPES, laid_out, own_address

LEAST_SCORES = 1 << 13  # scores to a thread at least: about 10 microseconds of work
SCORES_AT_ONCE = 1 << 14  # scores that a thread takes at a time, about
NUMBER = Struct("=q")
# entries
ROWS, ROWS_OF_LABELS, TOTAL = (f"rows.numba.batch:{name}" for name in ("rows", "rows_of_labels", "total"))


class Compiled(NamedTuple):
    """The compiled parts of a kernel, for scores of one precision and one kind of targets."""

    body: threads.Body  # the pass over the rows
    kernel: int  # the address of the kernel of one row, 0 where the body needs none
    functions: Sequence[int]  # the addresses of functions that the kernel calls, 0 for none


class BatchKernel:
    """A loss of rows by compiled bodies of its own, see :class:`topk_registry.ops.rows.api.Kernel`.

    Args:
        of_labels: the place of the body for rows that each have one label, see :mod:`topk_registry.ops.cpu.entries`.
        of_targets: that of the body for all other targets. It spreads the smoothing of labels, and is given
            distributions that are smoothed already.
        numbers: its own numbers.
        shares: ``(rows, classes, threads) -> (threads, block)``: how many threads share the rows, and how many rows one
            takes at a time.
        reads: the precisions of scores that the bodies read; scores in another one are converted to the first.
        check: raises where scores [B, n] are not what the loss needs; called after a loss that is not finite.
    """

    smooths: ClassVar[bool] = False  # whether the body for other targets smooths distributions

    def __init__(
        self,
        of_labels: str,
        of_targets: str,
        numbers: Sequence[float],
        *,
        shares: Callable[[int, int, int], tuple[int, int]],
        reads: Sequence[torch.dtype] = DTYPES,
        check: Callable[[Tensor], None] | None = None,
    ) -> None:
        self.of_labels, self.of_targets, self.shares = of_labels, of_targets, shares
        self.reads, self.check = reads, check
        self.numbers = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        self._compiled: dict[tuple[torch.dtype, bool], Compiled] = {}

    def compiled(self, dtype: torch.dtype, labels: bool) -> Compiled:
        """Return what is compiled for scores of a precision, and for labels or other targets."""
        return Compiled(entries.body(self.of_labels if labels else self.of_targets, dtype), 0, ())

    def operands(self, real: torch.dtype, own: Own) -> list[int | Tensor | None]:
        """The loss's own tensors as the body reads them: each in double precision, and its number of elements."""
        there = [on_cpu(one, torch.float64) for one in own if one is not None]
        return [part for one in there if one is not None for part in (one, one.numel())]

    def run(self, own: Own, options: Options, scores: Tensor, wanted: bool) -> tuple[Tensor, Tensor | None]:
        """See :class:`topk_registry.ops.rows.api.Kernel`.

        The scores are plain memory on the CPU. The gradient of float16 scores is in float32: in float16 it may
        underflow before the loss scaler multiplies it.
        """
        target, weight, smoothing, ignore_index, reduction = options
        (B, n), given = scores.shape, scores
        converted = scores.dtype not in self.reads
        if converted:
            scores = scores.to(self.reads[0])
        if scores.stride(1) != 1 or scores.stride(0) < n:
            scores = scores.contiguous()
        scores, stored = scores.resolve_neg(), scores.dtype
        real = torch.float64 if stored == torch.float64 else torch.float32
        label = q = shares = uniform = several = 0
        if isinstance(target, LabelMixture):
            target = target.in_memory()
            label, shares, several = own_address(target.labels), own_address(target.shares), target.shares.shape[1]
            uniform = 0 if target.uniform is None else own_address(target.uniform)
        elif target.is_floating_point():
            if smoothing and not self.smooths:
                target, smoothing = target.to(real) * (1 - smoothing) + smoothing / n, 0.0
            target = laid_out(target, real)
            q = own_address(target)
        else:
            target = laid_out(target, torch.int64)
            label = own_address(target)
        kind = stored, not (q or several or smoothing)
        if (compiled := self._compiled.get(kind)) is None:
            compiled = self._compiled[kind] = self.compiled(*kind)
        operands = [*compiled.functions, *self.operands(real, own)]
        weight, numbers = None if weight is None else laid_out(weight, torch.float64), self.numbers
        gradient = None
        if converted and scores is not given:  # a row is copied before its gradient is written
            gradient = scores
        elif wanted or not compiled.kernel:
            gradient = scores.new_empty((B, n), dtype=torch.float32 if stored == torch.float16 else stored)
        value = scores.new_empty((B,) if reduction == NONE else (), dtype=real)
        workers, block = self.shares(B, n, torch.get_num_threads())
        job = _memory(FIELDS + len(operands) + B)()
        # fmt: off
        LAYOUT.pack_into(
            job, 0,
            0, B, n, scores.stride(0), block, compiled.kernel, own_address(scores),
            0 if gradient is None else own_address(gradient), own_address(value), label, q, shares, uniform, several,
            0 if weight is None else own_address(weight), own_address(numbers), ignore_index, reduction, 0,
            len(operands), smoothing,
        )
        # fmt: on
        for i, one in enumerate(operands):
            if one is not None:
                NUMBER.pack_into(job, 8 * (FIELDS + i), one if isinstance(one, int) else own_address(one))
        threads.start(compiled.body, job, workers)
        entries.body(TOTAL, real)(job)
        if status := NUMBER.unpack_from(job, 8 * STATUS)[0]:
            if status == LABEL_OUT_OF_RANGE:
                check_range(target, n, ignore_index)
            if self.check is not None:
                self.check(given)
        return value if given.dtype == torch.float64 else value.float(), gradient


class RowKernel(BatchKernel):
    """A compiled kernel for one row, with its numbers and the compiled functions that it calls.

    Args:
        place: of its entry, see :mod:`topk_registry.ops.cpu.entries`.
        numbers: its own numbers.
        functions: ``(dtype, labels) -> addresses`` of functions, 0 for none, for the precision that it computes in and
            for whether the entry for rows that have a label each calls them.
        tensors: for that precision and the loss's own tensors, those that the kernel reads, contiguous on the CPU.
            None: the loss's own in that precision.
        of_label: whether there is an entry for rows that have a label each, too: ``place`` followed by "_of_label".
    """

    smooths = True

    def __init__(
        self,
        place: str,
        numbers: Sequence[float],
        functions: Callable[[torch.dtype, bool], Sequence[int]] | None = None,
        tensors: Callable[..., Sequence[Tensor | None]] | None = None,
        of_label: bool = False,
    ) -> None:
        super().__init__(ROWS_OF_LABELS, ROWS, numbers, shares=_shares)
        self.place, self.functions, self.tensors, self.of_label = place, functions, tensors, of_label

    def compiled(self, dtype: torch.dtype, labels: bool) -> Compiled:
        """See :meth:`BatchKernel.compiled`."""
        real = torch.float64 if dtype == torch.float64 else torch.float32
        labels_only = labels and self.of_label
        functions = () if self.functions is None else self.functions(real, labels_only)
        place = f"{self.place}_of_label" if labels_only else self.place
        return Compiled(super().compiled(dtype, labels).body, entries.address(place, real), functions)

    def operands(self, real: torch.dtype, own: Own) -> list[int | Tensor | None]:
        """See :meth:`BatchKernel.operands`."""
        return [on_cpu(one, real) for one in own] if self.tensors is None else [*self.tensors(real, *own)]


@lru_cache(maxsize=512)
def row_kernel(place: str, *numbers: float, of_label: bool = False) -> RowKernel:
    """Return the kernel of one row with these numbers, made once, for a family that calls no other functions."""
    return RowKernel(place, numbers, of_label=of_label)


def on_cpu(t: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A tensor of a loss as kernels for the CPU read it: itself where it is that, None where there is none."""
    return None if t is None else laid_out(t if t.is_cpu else t.cpu(), dtype)


@lru_cache(maxsize=1024)
def _shares(rows: int, classes: int, most: int) -> tuple[int, int]:
    """How many of ``most`` threads share rows that each have a kernel's call, and how many rows one takes at a time."""
    workers = max(1, min(most, rows, rows * classes // LEAST_SCORES))
    return workers, max(1, min(SCORES_AT_ONCE // classes, -(-rows // (4 * workers))))


@lru_cache(maxsize=64)
def _memory(numbers: int) -> type[ctypes.Array]:
    return ctypes.c_char * (8 * numbers)


kernels = BatchKernel
