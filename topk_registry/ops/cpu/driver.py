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
import gc
import hashlib
import os
import struct
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from numba import types
from numba.core.caching import FunctionCache, NullCache
from numba.core.ccallback import CFunc
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.core.sigutils import normalize_signature
from numba.extending import intrinsic
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor

from topk_registry.ops.backend import PLAIN
from topk_registry.ops.cpu.blocks import total_of
from topk_registry.ops.cpu.numbers import Compiler, compiled

NUMBERS = frozenset((int, float))
C_BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Kernel:
    """A function ``body(job)`` that is compiled, or loaded from numba's cache, at the first call of :meth:`run`."""

    def __init__(self, function: Callable) -> None:
        self.function = function
        self.body = cache(lambda: C_BODY(_compiled(function).address))

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
    parallel.argtypes, parallel.restype = (C_BODY, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return parallel


@lru_cache(maxsize=1)
def _pool(process: int) -> ThreadPoolExecutor:
    # cached per process id, because the threads of a pool do not survive a fork
    return ThreadPoolExecutor(max_workers=os.cpu_count() or 1, thread_name_prefix="topk_registry")


def _compiled(function: Callable) -> CFunc:
    arguments, result = normalize_signature(types.void(types.voidptr))
    options = {"error_model": "numpy", "fastmath": {"contract"}}
    body = _CFunc(function, (arguments, result), locals={}, options=options, pipeline_class=Compiler)
    try:
        body._cache = _Cache(function)
    except RuntimeError:  # no writable folder
        body._cache = NullCache()
    body.compile()
    return body


class _CFunc(CFunc):
    def _compile_uncached(self) -> Any:
        _log_compiling(self._cache.cache_path)
        with _lean():
            body = super()._compile_uncached()
            body.library.make_machine_code()
        return body


class _Linked(JITCodeLibrary):
    """LLVM code of a function. The code is optimized only as part of the kernel that calls the function.

    By default, numba optimizes every function together with the functions that it calls, and creates machine code for
    every function. Creating this code would take more than half of the compilation time.
    """

    # numba's passes over a single function stay, because they set the data layout that fast loops need

    is_machine_code = False

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True

    def make_machine_code(self) -> None:
        self._ensure_finalized()
        super()._optimize_final_module()
        super()._finalize_final_module()
        self.is_machine_code = True

    def get_pointer_to_function(self, name: str) -> int:
        # without machine code, a call from Python raises a TypeError
        return super().get_pointer_to_function(name) if self.is_machine_code else _BAD_ARGUMENT


_BAD_ARGUMENT: Any = ctypes.cast(ctypes.pythonapi.PyErr_BadArgument, ctypes.c_void_p).value


@contextmanager
def _lean() -> Iterator[None]:
    """Make numba compile faster within a ``with`` block: with :class:`_Linked` code and a cache of inferred types."""
    codegen, typing, collects = cpu_target.target_context.codegen(), cpu_target.typing_context, gc.isenabled()
    resolve, known = typing.resolve_function_type, {}

    def resolve_once(function: Any, arguments: tuple, keywords: dict) -> Any:
        if keywords or isinstance(function, (types.Dispatcher, types.BoundFunction)):
            return resolve(function, arguments, keywords)
        try:
            found = known.get((function, arguments))
        except TypeError:  # a literal slice has no hash
            return resolve(function, arguments, keywords)
        if found is None:
            found = known[function, arguments] = resolve(function, arguments, keywords)
        return found

    with global_compiler_lock:
        codegen._library_class, codegen.set_env = _Linked, lambda name, environment: None
        typing.resolve_function_type = resolve_once
        gc.disable()  # garbage collection would repeatedly scan all objects of torch
        try:
            yield
        finally:
            del codegen._library_class, codegen.set_env, typing.resolve_function_type
            if collects:
                gc.enable()


@cache
def _log_compiling(folder: str | None) -> None:
    kept = (
        f"once; they are cached in {folder}" if folder else "in each process: set NUMBA_CACHE_DIR to a writable folder"
    )
    print(f"topk-registry: compiling kernels for this processor, {kept}", file=sys.stderr, flush=True)


class _Cache(FunctionCache):
    """numba's cache on disk. If the source file of any kernel has changed, all kernels are compiled again."""

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return (*super()._index_key(sig, codegen), _edition())

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # unpickling a damaged file may raise anything
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            warnings.warn(f"compiled kernels cannot be cached ({error}): set NUMBA_CACHE_DIR", stacklevel=2)


@cache
def _edition() -> str:
    """Return a hash of the source files of all kernels: this folder, and all modules that import from this folder."""
    digest, here = hashlib.sha256(), Path(__file__).parent
    for file in sorted(here.parent.rglob("*.py")):
        source = file.read_bytes()
        if file.parent == here or b"topk_registry.ops.cpu" in source:
            digest.update(source)
    return digest.hexdigest()
