"""Compile the functions that kernels call, to be linked into them.

numba makes three things of every function that it compiles: LLVM's code, optimised; machine code; and wrappers for
callers in Python and in C. Kernels need LLVM's code alone of the functions that they call, as it is linked into theirs,
and it is optimised there, with theirs. The rest takes half of the time of compiling: numba would optimise a function
again with each that calls it, directly or not.

numba also asks the same two questions thousands of times: whether two sets of flags are equal, and how large an LLVM
type is. Their answers are looked up here, which saves another tenth. So does doing without Python's search for garbage,
which would go through all objects of torch again and again.
"""
# pyright: reportAttributeAccessIssue=false, reportPrivateUsage=false
# numba sets these attributes where pyright does not see it

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from numba import _dynfunc
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Flags
from numba.core.compiler_lock import global_compiler_lock
from numba.core.cpu import CPUTargetOptions
from numba.core.dispatcher import Dispatcher
from numba.core.registry import CPUDispatcher, cpu_target
from numba.core.targetconfig import TargetConfig

# raises TypeError, for a call from Python: a function that was compiled for kernels has no wrapper
_REFUSE = ctypes.cast(ctypes.pythonapi.PyErr_BadArgument, ctypes.c_void_p).value


class Linked(JITCodeLibrary):
    """LLVM's code of a function and of all that it calls. It is optimised, and turned into machine code, on request."""

    is_machine_code = False
    environment: tuple[str, Any] | None = None  # of a function: what numba looks up when it raises

    def _optimize_final_module(self) -> None:
        """Leave the function as it is: it is optimised within those that call it."""

    def _finalize_final_module(self) -> None:
        self._finalized = True

    def optimise(self) -> None:
        """Optimise the function and all that is linked into it."""
        self._ensure_finalized()
        super()._optimize_final_module()

    def make_machine_code(self) -> None:
        """Make machine code of the function and of all that is linked into it, once."""
        if not self.is_machine_code:
            self.is_machine_code = True
            self.optimise()
            super()._finalize_final_module()
            if self.environment is not None:
                self._codegen.set_env(*self.environment)

    def get_pointer_to_function(self, name: str) -> int:
        """The address of a function, 0 where it is not of this library."""
        self.make_machine_code()
        return super().get_pointer_to_function(name)


_HASH = hash(Flags())  # numba's hash of flags does not depend on their values


def _is_equal(flags: Flags, other: object) -> bool:
    """As ``Flags.__eq__``, which spells out every flag; flags that were set alike are equal."""
    return (type(other) is Flags and flags._values == other._values) or TargetConfig.__eq__(flags, other)


def _sizes(context: Any) -> Callable[[Any], int]:
    """As ``context.get_abi_sizeof``, which has LLVM parse a module at each call."""
    known: dict[str, int] = {}

    def size_of(kind: Any) -> int:
        name = str(kind)
        if name not in known:
            known[name] = kind.get_abi_size(context.target_data)
        return known[name]

    return size_of


class _NoWrappers(CPUTargetOptions):
    def finalize(self, flags: Any, options: Any) -> None:
        super().finalize(flags, options)
        flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True  # a C function's own compiler asks for the latter


def _executable(library: Linked, fndesc: Any, env: Any) -> Any:
    """A stand-in for what Python would call: numba knows a compiled function by it."""
    library.environment = cpu_target.target_context.get_env_name(fndesc), env
    module, name = fndesc.lookup_module(), fndesc.qualname.split(".")[-1]
    return _dynfunc.make_function(module, name, "compiled for kernels", _REFUSE, env, (library,))


class _Released:
    """Functions of other packages that a kernel has compiled: they stay as they were for Python.

    Without the wrappers they could not be called from Python. So what was compiled of them in a block is forgotten at
    its end, and neither kept on disk nor read from there.
    """

    def __init__(self) -> None:
        self.added: list[tuple[Dispatcher, Any]] = []

    def add_overload(self) -> Callable[[Dispatcher, Any], None]:
        """``Dispatcher.add_overload`` for a block."""
        add, added = Dispatcher.add_overload, self.added

        def add_overload(dispatcher: Dispatcher, overload: Any) -> None:
            add(dispatcher, overload)
            if dispatcher.py_func.__module__.partition(".")[0] not in ("numba", "topk_registry"):
                added.append((dispatcher, overload))

        return add_overload

    def forget(self) -> None:
        """Leave no function in a dispatcher that was added in the block."""
        for dispatcher in {id(one): one for one, _ in self.added}.values():
            kept = [one for one in dispatcher.overloads.values() if not any(one is new for _, new in self.added)]
            dispatcher._reset_overloads()
            for one in kept:
                dispatcher.add_overload(one)


def code_of(function: CFunc) -> tuple[str, str]:
    """Compile a C function to LLVM's code: that code, and the name of the function in it that numba calls."""
    with linked():
        compiled = function._compile_uncached()
        compiled.library.optimise()
        return compiled.library.get_llvm_str(), compiled.fndesc.llvm_func_name


@contextmanager
def linked() -> Iterator[None]:
    """Let numba compile every function in a ``with`` block to :class:`Linked` code."""
    with global_compiler_lock:  # no other thread compiles meanwhile
        context = cpu_target.target_context
        if "get_executable" in vars(context):  # within another block
            yield
            return
        released = _Released()
        changed = (
            (context, "get_executable", _executable),
            (context, "get_abi_sizeof", _sizes(context)),
            (context.codegen(), "_library_class", Linked),
            (cpu_target, "options", _NoWrappers),
            (CPUDispatcher, "add_overload", released.add_overload()),
            (FunctionCache, "load_overload", lambda cache, signature, context: None),
            (FunctionCache, "save_overload", lambda cache, signature, overload: None),
            (Flags, "__eq__", _is_equal),
            (Flags, "__hash__", lambda flags: _HASH),
        )
        collects = gc.isenabled()
        gc.disable()
        for owner, name, value in changed:
            setattr(owner, name, value)
        try:
            yield
        finally:
            if collects:
                gc.enable()
            for owner, name, _ in changed:
                delattr(owner, name)
            released.forget()
