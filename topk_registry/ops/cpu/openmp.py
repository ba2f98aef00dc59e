"""Share rows among threads: kernels compiled by numba run on the OpenMP threads that torch itself uses.

After each operation torch's threads spin for a few milliseconds and wait for the next one. Threads of our own would
share their cores with them. On torch's own threads work starts within microseconds. Where torch is built without
OpenMP, a pool of threads does the work.

A kernel is a C function ``body(job)``. All threads run the same body with the same job. They take rows from it, a few
at a time, by :func:`spans` until none are left. The result of a row must not depend on the thread that takes it.
"""

import ctypes
import os
import struct
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import torch
from numba import njit, types
from numba.extending import intrinsic
from torch import Tensor

from topk_registry.ops.cpu.compiling import kernel
from topk_registry.ops.tensors import address

Body = Callable[[ctypes.Array], None]
C_BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
SIGNATURE = types.void(types.voidptr)


def compiled(function: Callable) -> Body:
    """Compile a body for :func:`run`."""
    return kernel(SIGNATURE, function).ctypes


def run(body: Body, *values: Tensor | float | None, threads: int) -> None:
    """Run ``body`` on ``threads`` threads with one job of ``values``."""
    start(body, job_of(*values), threads)


def job_of(*values: Tensor | float | None) -> ctypes.Array:
    """Return a job: a counter of rows taken, then ``values``, eight bytes each.

    Integers stay integers, a tensor is handed over by its address, and None is address 0.
    """
    fields = "".join("d" if isinstance(value, float) else "q" for value in values)
    numbers = (0 if v is None else address(v) if isinstance(v, Tensor) else v for v in values)
    return ctypes.create_string_buffer(_layout(fields).pack(0, *numbers))


def start(body: Body, job: ctypes.Array, threads: int) -> None:
    """Let ``threads`` threads run ``body`` on a job, and wait for them."""
    if threads == 1:
        body(job)
    elif (parallel := _openmp()) is not None:
        parallel(body, job, threads, 0)
    else:
        pool = _pool(os.getpid())
        others = [pool.submit(body, job) for _ in range(threads - 1)]
        body(job)
        for other in others:
            other.result()


@lru_cache
def _layout(fields: str) -> struct.Struct:
    return struct.Struct(f"=q{fields}")


@intrinsic
def take(typing_context, job, count):
    """Take the next ``count`` rows of a job and return the first. Beyond the last row nothing is left to do."""

    def codegen(context, builder, signature, arguments):
        job, count = arguments
        counter = builder.bitcast(job, count.type.as_pointer())
        return builder.atomic_rmw("add", counter, count, "monotonic")

    return types.int64(types.voidptr, types.int64), codegen


@njit
def spans(job, step, count):
    """Yield (start, stop) of the rows that this thread takes, ``step`` at a time, until all ``count`` are taken."""
    start = take(job, step)  # pyright: ignore[reportCallIssue]  # numba gives an intrinsic its first parameter
    while start < count:
        yield start, min(start + step, count)
        start = take(job, step)  # pyright: ignore[reportCallIssue]


@intrinsic
def pointer(typing_context, address):
    """Turn an address among the values of a job into what ``numba.carray`` takes."""

    def codegen(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), codegen


@lru_cache(maxsize=1)
def edition() -> int:
    """A number that changes with the source of any compiled kernel: those of one operator call another's functions."""
    room = Path(__file__).parents[1]
    files = sorted((*room.glob("*.py"), *room.glob("cpu/*.py"), *room.glob("*/numba/*.py")))
    return zlib.crc32(b"".join(file.read_bytes() for file in files))


@lru_cache(maxsize=1)
def _openmp() -> Callable | None:
    """``GOMP_parallel(body, job, threads, flags)`` of the very library that torch is linked with."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        parallel = library.GOMP_parallel
    except (OSError, AttributeError):
        return None
    parallel.argtypes = (C_BODY, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    return parallel


@lru_cache(maxsize=1)
def _pool(process: int) -> ThreadPoolExecutor:
    """Threads that sleep between calls; a forked process starts its own."""
    return ThreadPoolExecutor(max_workers=os.cpu_count() or 1, thread_name_prefix="topk_registry")
