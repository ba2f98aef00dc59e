"""A curve: how the loss of a label depends on its probability, with the slope."""

import inspect
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from topk_registry.ops.backend import load
from topk_registry.ops.cpu.entries import address_of
from topk_registry.ops.cpu.library import library
from topk_registry.ops.targets.table import of_table

NO_PARAMETERS = (0.0,) * 7  # whether there is a number for each class, and six numbers


class Key(NamedTuple):
    """Everything of a curve that a kernel depends on, beside the numbers of its classes; see :class:`Curve`."""

    compiled: Any  # the function; None if the curve has no kernel
    numbers: tuple[float, ...]
    each: bool  # whether there is a number for each class
    others: bool
    logarithms: bool


@dataclass(eq=False, slots=True)  # not frozen: one is made at each call
class Curve:
    """The loss of a class as a function of its probability p.

    Args:
        definition: ``(log_p, log_not_p, own) -> on``, or ``-> (on, off)``, of tensors of one shape: the loss where the
            class is the label, and what the class adds where another one is. It is differentiated by autograd.
        compiled: the same for one class in plain floats, ``(log_p, log_not_p, p, not_p, own, numbers) -> (on, slope)``
            or ``-> (on, slope, off, slope of off)``. Slopes are those in the log-odds: that of log p is 1 - p, that of
            log(1 - p) is -p. It is a function of a module that may use ``math.exp``, ``math.expm1``, ``math.log``
            and ``math.log1p``, and writes its numbers as floats. None: the definition serves alone.
        numbers: parameters for ``compiled``, up to 6.
        own: a number for each class [n], which the definition gets in the shape of the probabilities; None for none.
        others: whether there is an ``off``.
        logarithms: whether ``compiled`` uses log_p or log_not_p.
    """

    definition: Callable[..., Any]
    compiled: Callable[..., tuple[float, ...]] | None = None
    numbers: tuple[float, ...] = ()
    own: Tensor | None = None
    others: bool = False
    logarithms: bool = True

    @property
    def key(self) -> Key:
        """Everything that the kernel depends on beside the numbers of ``own``."""
        return Key(self.compiled, self.numbers, self.own is not None, self.others, self.logarithms)


def losses_of(curve: Curve, log_p: Tensor, log_not: Tensor, target: Tensor | None) -> Tensor:
    """The losses of a target, or the table of None, from log p and log(1 - p) [B, n] of each class."""
    table = curve.definition(log_p, log_not, None if curve.own is None else curve.own.to(log_p))
    if not curve.others:
        return of_table(table, target)
    on, off = table
    if target is None or not target.is_floating_point():
        return of_table(on - off + off.sum(-1, keepdim=True), target)
    return of_table(on, target) + ((target.sum(-1, keepdim=True) - target) * off).sum(-1)


def parameters(key: Key) -> list[float]:
    """The numbers of a curve as its compiled form takes them."""
    if len(key.numbers) > 6:
        raise ValueError(f"a curve has at most 6 numbers, got {len(key.numbers)}")
    return [float(key.each), *key.numbers, *[0.0] * (6 - len(key.numbers))]


def on_gpu(key: Key) -> tuple[Any, dict[str, float], dict[str, Any]] | None:
    """A curve as a Triton function, and its numbers and constants there; None where it has no such form."""
    curves = load("topk_registry.ops.rows.triton.curves")
    try:
        function = curves.compiled(key.compiled)
    except curves.UnsupportedCurveError:
        return None
    numbers = {f"x{i}": number for i, number in enumerate(parameters(key)[1:])}
    return function, numbers, {"OTHERS": key.others, "EACH": key.each}


@dataclass(frozen=True)
class Compiled:
    """The curve, kind and precision that a compiled form is of.

    Args:
        curve: see :attr:`Curve.compiled`.
        others: see :class:`Curve`.
        softmax: whether its probabilities are those of softmax; else they are given.
        dtype: the precision.
    """

    curve: Callable[..., tuple[float, ...]]
    others: bool
    softmax: bool
    dtype: torch.dtype

    @property
    def symbol(self) -> str:
        """Its name in a library: the kind, the curve's name, a checksum of its source file, and the precision."""
        kind = f"{'softmax' if self.softmax else 'curve'}{'_others' if self.others else ''}"
        name = f"{self.curve.__module__}_{self.curve.__qualname__}".replace("<", "").replace(">", "")
        return f"{kind}_{name}_{_fingerprint(self.curve):08x}_{self.dtype}".replace("torch.", "").replace(".", "_")


_collected: list[list[Compiled]] = []


def address(key: Key, dtype: torch.dtype, *, softmax: bool = False) -> int:
    """The address of the compiled curve for one precision: of given probabilities, or of those of softmax.

    Raises:
        ImportError: no library has it, and numba is not installed.
    """
    one = Compiled(key.compiled, key.others, softmax, dtype)
    if _collected:
        _collected[-1].append(one)
        return 0
    return address_of(one.symbol, lambda: load("topk_registry.ops.rows.numba.curves").address_of(one))


@cache
def is_compilable(key: Key, *, softmax: bool = False) -> bool:
    """Whether the compiled form of a curve can be had: from the library of kernels, or by numba. Warns where not."""
    if _collected or find_spec("numba") is not None:
        return True
    if library().get(Compiled(key.compiled, key.others, softmax, torch.float32).symbol) is not None:
        return True
    name = f"{key.compiled.__module__}.{key.compiled.__qualname__}"
    warnings.warn(f"{name} is compiled by numba, which is not installed: torch operations serve", stacklevel=2)
    return False


@contextmanager
def collecting() -> Iterator[list[Compiled]]:
    """Collect the curves that are asked for in a ``with`` block; none is compiled, and their addresses are 0."""
    _collected.append([])
    try:
        yield _collected[-1]
    finally:
        _collected.pop()


def _fingerprint(curve: Callable) -> int:
    """A number that changes with the file of a function, which may use numbers and functions that stand there."""
    try:
        file = inspect.getsourcefile(curve)
        source = Path(file).read_bytes() if file else b""
    except (OSError, TypeError):  # written in a notebook, or at a prompt
        source = inspect.getsource(curve).encode()
    return zlib.crc32(source)
