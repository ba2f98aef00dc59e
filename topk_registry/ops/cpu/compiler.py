"""Compile the body of a kernel to machine code. All use of numba's internals is in this file.

numba's public API alone would optimize each function together with the functions that it calls, and then create machine
code for each function. The first use of a kernel would take 31 processor seconds for class indices and 55 for label
smoothing, in place of 10 and 23 (numba 0.68.1, one thread of a busy machine). :class:`LinkedCode` postpones both steps
until all functions of a kernel are linked.
"""

import ctypes
import hashlib
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CellType, FunctionType
from typing import Any

from numba import cfunc
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target

from topk_registry.ops.cpu.numbers import FASTMATH

# numba asks each function for an address. A call from Python to this address raises a TypeError.
NO_CODE: Any = ctypes.cast(ctypes.pythonapi.PyErr_BadArgument, ctypes.c_void_p).value


def compiled_body(function: Callable) -> Any:
    """Compile a function ``body(job)``, or load it from numba's cache. Return a C function that takes an address.

    The function is compiled again if the source file of any kernel has changed.
    """
    body = _with_edition(function)
    with linked_code():
        try:
            code = cfunc("void(voidptr)", cache=True, **FASTMATH)(body)
        except Exception as error:  # no writable folder, a full disk; a damaged file may raise anything
            warnings.warn(
                f"numba cannot cache compiled kernels, so each process compiles them ({error}): "
                "set NUMBA_CACHE_DIR to another folder",
                stacklevel=2,
            )
            code = cfunc("void(voidptr)", **FASTMATH)(body)
    address: Any = code.address
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)


def _with_edition(function: Callable) -> FunctionType:
    # numba's cache finds a function by its bytecode and by the values of its free variables. A free variable with the
    # hash of all sources also covers the functions that the kernel calls.
    code = function.__code__.replace(co_freevars=("edition",))
    return FunctionType(code, function.__globals__, function.__name__, None, (CellType(edition()),))


@cache
def edition() -> str:
    """Return a hash of the source files of all kernels: this folder, and all modules that import from this folder."""
    digest, here = hashlib.sha256(), Path(__file__).parent
    for file in sorted(here.parent.rglob("*.py")):
        source = file.read_bytes()
        if file.parent == here or b"topk_registry.ops.cpu" in source:
            digest.update(source)
    return digest.hexdigest()


@contextmanager
def linked_code() -> Iterator[None]:
    """Make numba use :class:`LinkedCode` within a ``with`` block."""
    target: Any = cpu_target.target_context
    target.refresh()  # compiles numba's runtime, whose code must not be postponed
    codegen = target.codegen()
    with global_compiler_lock:
        codegen._library_class, codegen.set_env = LinkedCode, lambda name, environment: None
        try:
            yield
        finally:
            del codegen._library_class, codegen.set_env


class LinkedCode(JITCodeLibrary):
    """LLVM code of a function. Only the code of a kernel's body is optimized and becomes machine code.

    The body is the function that numba stores in its cache, or that C code calls. The code of all other functions is
    linked into the code of the body.
    """

    # numba's passes over a single function stay, because they set the data layout that fast loops need

    is_machine_code = False

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        if self._shared_module is None:
            _log_compiling()
            self._finalized = True
        else:  # loaded from the cache
            self.is_machine_code = True
            super()._finalize_final_module()

    def make_machine_code(self) -> None:
        self._ensure_finalized()
        if not self.is_machine_code:
            self.is_machine_code = True
            super()._optimize_final_module()
            super()._finalize_final_module()

    def serialize_using_object_code(self) -> Any:
        self.make_machine_code()
        return super().serialize_using_object_code()

    def get_pointer_to_function(self, name: str) -> int:
        if name.startswith("cfunc."):
            self.make_machine_code()
        return super().get_pointer_to_function(name) if self.is_machine_code else NO_CODE


@cache
def _log_compiling() -> None:
    print("topk-registry: compiling kernels for this processor", file=sys.stderr, flush=True)
