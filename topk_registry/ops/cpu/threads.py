"""Run compiled bodies on the threads that torch itself uses.

After each operation torch's threads spin for a few milliseconds and wait for the next one. Threads of our own would
share their cores with them. On torch's own threads work starts within microseconds. Where torch is built without
OpenMP, a pool of threads does the work.

A body is a C function ``body(job)``. All threads run the same body with the same job, and take rows from it, see
:mod:`topk_registry.ops.cpu.jobs`. Nothing here needs numba: bodies may come from a library.
"""

import ctypes
import os
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from topk_registry.ops.tensors import address

Body = Callable[[ctypes.Array], None]
C_BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def run(body: Body, *values: Tensor | float | None, threads: int) -> None:
    """Run ``body`` on ``threads`` threads with one job of ``values``."""
    start(body, job_of(*values), threads)


def job_of(*values: Tensor | float | None) -> ctypes.Array:
    """Return a job: a counter of rows taken, then ``values``, eight bytes each.

    Integers stay integers, a tensor is handed over by its address, and None is address 0.
    """
    fields = "".join("d" if isinstance(value, float) else "q" for value in values)
    numbers = (0 if v is None else address(v) if isinstance(v, Tensor) else v for v in values)
    return ctypes.create_string_buffer(layout(fields).pack(0, *numbers))


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
def layout(fields: str) -> struct.Struct:
    """The memory of a job: a counter, then integers ("q") and floats ("d")."""
    return struct.Struct(f"=q{fields}")


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
