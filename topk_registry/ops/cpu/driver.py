"""Compile a kernel at its first use, and run it on the threads of torch.

A kernel is a C function ``body(job)``. The job is an array with 8 bytes per entry. The first two entries count the rows
that threads have taken and the rows that threads have finished. The other entries are the arguments: integers, floats
and addresses of tensors. All threads run the same body with the same job. Each thread takes rows by :func:`spans` until
no row is left.

The kernels use the OpenMP threads of torch. After an operation, these threads keep their cores busy for a few
milliseconds while they wait for work, so other threads would compete with them. If torch has no OpenMP, the kernels use
a Python thread pool.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# numba's intrinsics are called without their first parameter, and pyright does not see attributes that numba sets

import ctypes
import os
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from numba import types
from numba.extending import intrinsic
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor

from topk_registry.ops.backend import PLAIN
from topk_registry.ops.cpu.blocks import total_of
from topk_registry.ops.cpu.compiler import compiled_body
from topk_registry.ops.cpu.numbers import compiled

NUMBERS = frozenset((int, float))


class Kernel:
    """A function ``body(job)`` that is compiled, or loaded from numba's cache, at the first call of :meth:`run`."""

    def __init__(self, function: Callable) -> None:
        self.function = function
        self.body = cache(lambda: compiled_body(function))

    def run(self, threads: int, *values: Tensor | float | None) -> None:
        """Call the kernel's function ``body(job)`` on ``threads`` threads. The array ``job`` holds the ``values``.

        For a tensor, ``job`` holds the address of the memory. For None, ``job`` holds 0. Raise a TypeError for a
        tensor that a kernel cannot read: one on another device, of a subclass, negated, or with gaps between the
        entries of a row. The rows of a tensor [B, n] may be further apart than n entries, so the caller passes their
        distance.
        """
        layout, memory = _layout(tuple(map(type, values)))
        job = memory()
        entries: list[float] = []
        t: Any
        for t in values:
            if type(t) in NUMBERS:
                entries.append(t)
                continue
            if t is None:
                entries.append(0)
                continue
            wrapped = type(t) not in PLAIN or is_functorch_wrapped_tensor(t) or is_legacy_batchedtensor(t)
            if wrapped or not t.is_cpu or t.is_neg() or not (t.is_contiguous() or _has_plain_rows(t)):
                raise TypeError(
                    f"a kernel needs plain contiguous memory on the CPU, got {type(t).__name__} {list(t.shape)} "
                    f"with strides {t.stride()} on {t.device}"
                )
            entries.append(t.data_ptr())
        layout.pack_into(job, 0, 0, 0, *entries)
        if threads == 1:
            self.body()(job)
        elif (parallel := _openmp()) is not None:
            parallel(self.body(), job, threads, 0)
        else:
            others = [_pool(os.getpid()).submit(self.body(), job) for _ in range(threads - 1)]
            self.body()(job)
            for other in others:
                other.result()


def kernel(function: Callable) -> Kernel:
    """Make a :class:`Kernel` of a function ``body(job)``. Use this function as a decorator."""
    return Kernel(function)


def _has_plain_rows(t: Tensor) -> bool:
    return t.ndim == 2 and t.stride(1) == 1 and t.stride(0) >= t.shape[1]


@cache
def _layout(kinds: tuple[type, ...]) -> tuple[struct.Struct, type[ctypes.Array]]:
    layout = struct.Struct("=qq" + "".join("d" if kind is float else "q" for kind in kinds))
    return layout, ctypes.c_char * layout.size


@intrinsic
def _count(typing_context, job, entry, number):
    def codegen(context, builder, signature, arguments):
        job, entry, number = arguments
        counter = builder.gep(builder.bitcast(job, number.type.as_pointer()), [entry])
        return builder.atomic_rmw("add", counter, number, "acq_rel")

    return types.int64(types.voidptr, types.int64, types.int64), codegen


count_up: Any = _count  # count_up(job, entry, number): add a number to entry 0 or 1 of a job; return the entry before


@compiled
def spans(job, block, count):
    """Yield ranges (start, stop) of up to ``block`` rows. Threads with the same ``job`` share all ``count`` rows."""
    start = count_up(job, 0, block)
    while start < count:
        yield start, min(start + block, count)
        start = count_up(job, 0, block)


@compiled
def add_up(job, done, losses, total):
    """Write the sum of all losses [B] to ``total`` [1], or nothing if ``total`` is empty.

    Each thread calls this function after its last row. ``done`` is the number of rows of this thread. The thread that
    finishes last computes the sum, so the result does not depend on the number of threads.
    """
    if len(total) > 0 and count_up(job, 1, done) + done == len(losses):
        total[0] = total_of(losses)


@cache
def _openmp() -> Callable | None:
    """Return the function ``GOMP_parallel(body, job, threads, flags)`` of torch's OpenMP library, None if missing."""
    try:
        parallel = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).GOMP_parallel
    except (OSError, AttributeError):
        return None
    body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    parallel.argtypes = body, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint
    parallel.restype = None
    return parallel


@lru_cache(maxsize=1)
def _pool(process: int) -> ThreadPoolExecutor:
    # cached per process id, because the threads of a pool do not survive a fork
    return ThreadPoolExecutor(max_workers=os.cpu_count() or 1, thread_name_prefix="topk_registry")
