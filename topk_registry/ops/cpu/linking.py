"""Compile the functions that kernels call, to be linked into them.

numba makes three things of every function that it compiles: LLVM's code, machine code, and wrappers for callers in
Python and in C. Kernels need LLVM's code alone of the functions that they call, as it is linked into theirs. The rest
takes a third of the time of compiling.
"""
# pyright: reportAttributeAccessIssue=false, reportPrivateUsage=false
# numba sets these attributes where pyright does not see it

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from numba import _dynfunc
from numba.core.ccallback import CFunc
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler_lock import global_compiler_lock
from numba.core.cpu import CPUTargetOptions
from numba.core.registry import cpu_target

# raises TypeError, for a call from Python: a function that was compiled for kernels has no wrapper
_REFUSE = ctypes.cast(ctypes.pythonapi.PyErr_BadArgument, ctypes.c_void_p).value


class Linked(JITCodeLibrary):
    """LLVM's code of a function. Machine code is made of it where it is asked for."""

    is_machine_code = False
    environment: tuple[str, Any] | None = None  # of a function: what numba looks up when it raises

    def _finalize_final_module(self) -> None:
        self._finalized = True

    def make_machine_code(self) -> None:
        """Make machine code of the function and of all that is linked into it, once."""
        self._ensure_finalized()
        if not self.is_machine_code:
            self.is_machine_code = True
            super()._finalize_final_module()
            if self.environment is not None:
                self._codegen.set_env(*self.environment)

    def get_pointer_to_function(self, name: str) -> int:
        """The address of a function, 0 where it is not of this library."""
        self.make_machine_code()
        return super().get_pointer_to_function(name)


class _NoWrappers(CPUTargetOptions):
    def finalize(self, flags: Any, options: Any) -> None:
        super().finalize(flags, options)
        flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True  # a C function's own compiler asks for the latter


def _executable(library: Linked, fndesc: Any, env: Any) -> Any:
    """A stand-in for what Python would call: numba knows a compiled function by it."""
    library.environment = cpu_target.target_context.get_env_name(fndesc), env
    module, name = fndesc.lookup_module(), fndesc.qualname.split(".")[-1]
    return _dynfunc.make_function(module, name, "compiled for kernels", _REFUSE, env, (library,))


def code_of(function: CFunc) -> tuple[str, str]:
    """Compile a C function to LLVM's code: that code, and the name of the function in it that numba calls."""
    with linked():
        found = function._compile_uncached()
        found.library._ensure_finalized()
        return found.library.get_llvm_str(), found.fndesc.llvm_func_name


@contextmanager
def linked() -> Iterator[None]:
    """Let numba compile every function in a ``with`` block to :class:`Linked` code."""
    with global_compiler_lock:  # no other thread compiles meanwhile
        context = cpu_target.target_context
        if "get_executable" in vars(context):  # within another block
            yield
            return
        changed = (context, "get_executable", _executable), (context.codegen(), "_library_class", Linked)
        for owner, name, value in (*changed, (cpu_target, "options", _NoWrappers)):
            setattr(owner, name, value)
        try:
            yield
        finally:
            for owner, name, _ in (*changed, (cpu_target, "options", None)):
                delattr(owner, name)
