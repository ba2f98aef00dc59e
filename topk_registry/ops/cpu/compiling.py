"""Compile kernels: once a machine, never in silence, and whatever state the folder that keeps them is in.

Every kernel goes through :func:`kernel`. numba keeps compiled functions in ``NUMBA_CACHE_DIR``, else beside the source,
else in the user's cache folder. The cache here adds what numba's leaves out: a kernel is also read where nothing can be
written, as in a container's image; a damaged file is compiled anew; a full disk is a warning; and a kernel says which
one it is, as two processes that write at once may leave one's kernel under the other's name.
"""
# pyright: reportAttributeAccessIssue=false
# numba sets these attributes where pyright does not see it

import os
import pickle
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from numba import config
from numba.core.caching import (
    CompileResultCacheImpl,
    FunctionCache,
    InTreeCacheLocator,
    NullCache,
    UserProvidedCacheLocator,
)
from numba.core.ccallback import CFunc
from numba.core.compiler_lock import global_compiler_lock
from numba.core.serialize import dumps
from numba.core.sigutils import normalize_signature

from topk_registry.ops.backend import check_compiling, loading
from topk_registry.ops.cpu.library import OPERATORS, edition
from topk_registry.ops.cpu.linking import linked

PATIENCE = 2.0  # seconds of compilation without a word


def kernel(signature: object, function: Callable, name: str, **options: object) -> CFunc:
    """Compile a function to a C function of this signature, or load it; it is never freed.

    ``name`` and the sources of all kernels are what it is known by where it is kept. What the function holds in its
    closure must follow from them.
    """
    args, result = normalize_signature(signature)
    compiled = _Kernel(function, (args, result), locals={}, options=options)
    compiled.enable_caching(name)
    compiled.compile()
    _alive.append(compiled)
    return compiled


def folder() -> str:
    """The folder that compiled kernels were last found in or written to; "" for none."""
    return _kept.folder


def problem() -> str:
    """Why a kernel of this process could not be kept, "" if all could."""
    return _kept.problem


class Notice:
    """Say once that kernels are compiled, when that has gone on for some seconds in all.

    Args:
        seconds: how long.
        clock: gives seconds.
        timer: ``(seconds, function)``: an object that calls it then unless it is cancelled, as ``threading.Timer``.
    """

    def __init__(
        self,
        seconds: float = PATIENCE,
        clock: Callable[[], float] = time.monotonic,
        timer: Callable[[float, Callable[[], None]], Any] = threading.Timer,
    ) -> None:
        self.left, self.clock, self.timer = seconds, clock, timer
        self.said = False
        self._lock = threading.Lock()

    @contextmanager
    def over(self, place: str) -> Iterator[None]:
        """Count the time of a ``with`` block; ``place`` is where its kernel will be kept."""
        if self.said:
            yield
            return
        timer, begin = self.timer(max(0.0, self.left), lambda: self.say(place)), self.clock()
        timer.daemon = True  # an interrupted process does not wait for it
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            with self._lock:
                self.left -= self.clock() - begin

    def say(self, place: str) -> None:
        """Write the line, the first time."""
        with self._lock:
            if self.said:
                return
            self.said = True
        kept = f"which is done once; they are kept in {place}" if place else "and there is no place to keep them"
        with suppress(OSError, ValueError, AttributeError):  # a closed stream, or none
            start = "\r\x1b[K" if sys.stderr.isatty() else ""  # over a bar of progress
            print(f"{start}topk-registry: compiling kernels for this processor, {kept}", file=sys.stderr, flush=True)


class _Kept:
    """Where kernels are kept, and what went wrong."""

    folder = ""
    problem = ""


def _wait_for_others() -> None:
    """Let a fork wait for the kernel that another thread compiles.

    A thread that imports kernels holds ``loading`` and may compile then: so the locks are taken in this order.
    """
    loading.acquire()
    global_compiler_lock.acquire()


def _let_others_go_on() -> None:
    global_compiler_lock.release()
    loading.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_wait_for_others, after_in_parent=_let_others_go_on, after_in_child=_let_others_go_on)

_alive: list[CFunc] = []
_kept, _notice = _Kept(), Notice()


class _Marked(CompileResultCacheImpl):
    """A kernel with its full key and a checksum."""

    mark = ""

    def reduce(self, cres: Any) -> Any:
        data = dumps(super().reduce(cres))
        return self.mark, zlib.crc32(data), data

    def rebuild(self, target_context: Any, payload: Any) -> Any:
        mark, checksum, data = payload
        if mark != self.mark or zlib.crc32(data) != checksum:
            raise ValueError("not the kernel that was looked for")
        return super().rebuild(target_context, pickle.loads(data))


class _Cache(FunctionCache):
    """A folder that can be written."""

    _impl_class = _Marked

    def __init__(self, function: Callable, name: str) -> None:
        self.name = name
        super().__init__(function)

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        """numba sees neither that other files have changed, nor into compiled functions that a closure holds."""
        return sig, codegen.magic_tuple(), self.name, edition()

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The kernel, or None where there is none or its file is damaged."""
        target_context.refresh()
        self._impl.mark = repr(self._index_key(sig, target_context.codegen()))
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # whatever unpickling garbage may raise
            self.clear()
            return None

    def clear(self) -> None:
        """Forget the files of this function: numba reads them again before it writes."""
        with suppress(OSError):
            self.flush()


class _AsItIs:
    """Finds the folder where kernels would be kept, whether or not it can be written."""

    @staticmethod
    def from_function(function: Callable, file: str) -> Any:
        return (UserProvidedCacheLocator if config.CACHE_DIR else InTreeCacheLocator)(function, file)


class _MarkedAsItIs(_Marked):
    _locator_classes = [_AsItIs]  # noqa: RUF012  # numba's own attribute


class _ReadCache(_Cache):
    """A folder that is only read."""

    _impl_class = _MarkedAsItIs

    def clear(self) -> None:
        """Leave all as it is."""


class _Kernel(CFunc):
    """numba's C function with the cache of this file."""

    def enable_caching(self, name: str = "") -> None:
        """Choose a folder to write to, and another to read where the first choice cannot be written."""
        try:
            self._cache: Any = _Cache(self._pyfunc, name)
        except RuntimeError as error:
            if "cannot cache" not in str(error):
                raise
            self._cache = NullCache()
        self._cache = _Pair(self._cache, _elsewhere(self._pyfunc, name, self._cache.cache_path))

    def _compile_uncached(self) -> Any:
        check_compiling()
        with _notice.over(self._cache.place), linked():
            compiled = super()._compile_uncached()
            compiled.library.make_machine_code()
        return compiled


def _elsewhere(function: Callable, name: str, written: str | None) -> _ReadCache | None:
    """The folder to read beside the one that is written, where there is another."""
    if config.CACHE_LOCATOR_CLASSES:  # the user chose all cache folders: read no other
        return None
    try:
        cache = _ReadCache(function, name)
    except OSError:  # no source file, as in an archive
        return None
    return None if cache.cache_path == written else cache


class _Pair:
    """A cache as numba uses it: load from either folder, save to the one that can be written."""

    def __init__(self, own: Any, other: _ReadCache | None) -> None:
        self.own, self.other = own, other
        self.place = _outermost(own.cache_path)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The kernel that is kept, or None."""
        for cache in (self.own, self.other):
            if cache is not None and (kept := cache.load_overload(sig, target_context)) is not None:
                _kept.folder = _outermost(cache.cache_path)
                return kept
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep a kernel, or warn."""
        why = "no folder can be written"
        if self.place:
            try:
                self.own.save_overload(sig, data)
            except OSError as error:
                why = f"{self.place}: {error.strerror or error}"
            else:
                _kept.folder = self.place
                return
        _kept.problem = why
        warnings.warn(
            f"there is no place for compiled kernels ({why}), so every process compiles its own, for some seconds "
            "each: set NUMBA_CACHE_DIR to a folder that can be written",
            stacklevel=2,
        )


def _outermost(path: str | None) -> str:
    """The folder that holds the folders of all kernels, of which this is one; "" for None."""
    if path is None:
        return ""
    if config.CACHE_DIR:
        return str(config.CACHE_DIR)
    inside = Path(path)
    return str(OPERATORS if OPERATORS in inside.parents else inside.parent)
