"""Run a loss of rows over a batch: targets, class weights, ignored rows, reduction and precision, in one call.

A compiled body turns every kind of target into what a kernel takes: a label with a mass, or a mass for every class.
Rows are shared among threads; a row's result does not depend on who works on it, and the rows are added up in order,
so that results repeat bit for bit. Nothing here needs numba: bodies and kernels may come from a library.
"""

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from struct import Struct

import torch
from torch import Tensor

from topk_registry.ops.cpu import entries, threads
from topk_registry.ops.rows.backends import Kernels
from topk_registry.ops.rows.numba.job import FIELDS, LABEL_OUT_OF_RANGE, LAYOUT, NONE, STATUS
from topk_registry.ops.targets.label_mixture import LabelMixture
from topk_registry.ops.tensors import address, own_address

ALONE = 1 << 13  # scores to a thread at least: about 10 microseconds of work
SPAN = 1 << 14  # scores that a thread takes at a time, about
NUMBER = Struct("=q")
ROWS, TOTAL = "rows.numba.batch:rows", "rows.numba.batch:total"  # entries


def run(
    kernel: int,
    s: Tensor,
    target: Tensor | LabelMixture,
    weight: Tensor | None,
    smoothing: float,
    ignore_index: int,
    reduction: int,
    numbers: Tensor,
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
    (B, n), stored = s.shape, s.dtype
    kept = torch.float32 if stored == torch.float16 else stored
    gradient = torch.empty((B, n), dtype=kept) if want_gradient else None
    team = max(1, min(torch.get_num_threads(), B, B * n // ALONE))
    step = max(1, min(SPAN // n, -(-B // (4 * team))))
    options = smoothing, ignore_index, reduction
    rows = entries.body(ROWS, stored)
    value, status = launch(rows, kernel, s, gradient, target, weight, *options, numbers, operands, team, step)
    return value, gradient, status != LABEL_OUT_OF_RANGE


def launch(
    rows: threads.Body,
    kernel: int,
    s: Tensor,
    gradient: Tensor | None,
    target: Tensor | LabelMixture,
    weight: Tensor | None,
    smoothing: float,
    ignore_index: int,
    reduction: int,
    numbers: Tensor,
    operands: Sequence[int | Tensor | None],
    team: int,
    step: int,
) -> tuple[Tensor, int]:
    """Let ``team`` threads run a body, ``step`` rows at a time; return the loss and a status, see job.py.

    The arguments are those of :func:`run`; s is plain memory on the CPU, as ``readable`` says, and all others are laid
    out for kernels. ``gradient`` is contiguous memory that is written; it may be that of s.
    """
    (B, n), real = s.shape, torch.float64 if s.dtype == torch.float64 else torch.float32
    label = q = shares = uniform = several = 0
    if isinstance(target, LabelMixture):
        label, shares, several = own_address(target.labels), own_address(target.shares), target.shares.shape[1]
        uniform = 0 if target.uniform is None else own_address(target.uniform)
    elif target.dtype == torch.int64:
        label = own_address(target)
    else:
        q = own_address(target)
    value = torch.empty((B,) if reduction == NONE else (), dtype=real)
    first = s if B == 0 or s.is_contiguous() else s[0]  # its address is that of the first row
    written = 0 if gradient is None else own_address(gradient)
    job = _memory(FIELDS + len(operands) + B)()
    # fmt: off
    LAYOUT.pack_into(
        job, 0,
        0, B, n, s.stride(0), step, kernel, address(first), written, own_address(value),
        label, q, shares, uniform, several, 0 if weight is None else own_address(weight), own_address(numbers),
        ignore_index, reduction, 0, len(operands), smoothing,
    )
    # fmt: on
    for i, one in enumerate(operands):
        if one is not None:
            NUMBER.pack_into(job, 8 * (FIELDS + i), one if isinstance(one, int) else own_address(one))
    threads.start(rows, job, team)
    entries.body(TOTAL, real)(job)
    return value, NUMBER.unpack_from(job, 8 * STATUS)[0]


@lru_cache(maxsize=64)
def _memory(numbers: int) -> type[ctypes.Array]:
    return ctypes.c_char * (8 * numbers)


kernels = Kernels(run)
