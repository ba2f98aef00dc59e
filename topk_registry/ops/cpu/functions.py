"""Elementary functions for kernels of either precision, and C functions that call each other by address.

A curve written in plain Python with ``math.exp``, ``math.expm1``, ``math.log`` and ``math.log1p`` is compiled with the
functions here in their place, which turn into vector instructions.
"""
# pyright: reportCallIssue=false, reportArgumentType=false
# numba's intrinsics are called without their first parameter

import math
from collections.abc import Callable
from functools import cache
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

from topk_registry.ops.cpu.compiling import kernel
from topk_registry.ops.cpu.entries import symbol
from topk_registry.ops.cpu.numbers import (
    exp32,
    exp64,
    expm1_32,
    expm1_64,
    log32,
    log64,
    power_of_2_32,
    power_of_2_64,
)

_TYPES = {"int64": types.int64, "double": types.float64, "pointer": types.voidptr, "void": types.void}
# a call inside a loop keeps it from becoming vector instructions, and LLVM inlines small functions only
_INLINE = {"error_model": "numpy", "fastmath": {"contract"}, "forceinline": True}
_OPTIONS = {"jit_options": _INLINE}


class CFunction(NamedTuple):
    """The type of a C function: what numba compiles it to, and how a kernel calls one by its address."""

    signature: object
    call: Callable


def function_type(result: str, *arguments: str) -> CFunction:
    """The type of a C function of these arguments; addresses are passed as integers, see memory.py."""
    given = tuple(_TYPES[name] for name in arguments)
    passed = tuple(types.int64 if name == "pointer" else _TYPES[name] for name in arguments)

    @intrinsic
    def call(typing_context, address, arguments):
        def codegen(context, builder, signature, operands):
            address, values = operands
            values = [builder.extract_value(values, i) for i in range(len(given))]
            pointer = context.get_value_type(types.voidptr)
            values = [
                builder.inttoptr(value, pointer) if kind is types.voidptr else value
                for kind, value in zip(given, values, strict=True)
            ]
            function = ir.FunctionType(
                context.get_value_type(_TYPES[result]), [context.get_value_type(one) for one in given]
            )
            return builder.call(builder.inttoptr(address, function.as_pointer()), values)

        return _TYPES[result](types.int64, types.Tuple(passed)), codegen

    return CFunction(_TYPES[result](*given), call)


class Precision(NamedTuple):
    """Precision that an entry is compiled for."""

    stored: type  # of the scores in memory; np.uint16 for both kinds of half precision
    real: type  # of the numbers that it computes with
    half: bool
    is_bfloat16: bool  # bfloat16


PRECISIONS = {
    torch.float64: Precision(np.float64, np.float64, False, False),
    torch.float32: Precision(np.float32, np.float32, False, False),
    torch.float16: Precision(np.uint16, np.float32, True, False),
    torch.bfloat16: Precision(np.uint16, np.float32, True, True),
}
BODY = function_type("void", "pointer")  # body(job)


class Entry:
    """A function that makes a C function for one precision: ``make(precision) -> function``.

    Calling it with a dtype gives the address; it is compiled once, kept on disk, and never freed.

    Args:
        make: returns the function to compile.
        kind: the type of the C function.
        dtypes: the precisions that it is made for.
        sums: whether a loop that adds up may do so in any order; else such a loop has no vector instructions.
        name: its symbol; "" for the one of its place.
    """

    def __init__(
        self,
        make: Callable[[Precision], Callable],
        kind: CFunction,
        dtypes: tuple[torch.dtype, ...],
        sums: bool = False,
        name: str = "",
    ) -> None:
        self.make, self.kind, self.dtypes, self.name = make, kind, dtypes, name
        self.options = {"error_model": "numpy", "fastmath": {"contract", "reassoc"} if sums else {"contract"}}
        self.address = cache(self._address)

    def __call__(self, dtype: torch.dtype) -> int:
        """The address of the C function for a precision."""
        return self.address(dtype)

    def symbol(self, dtype: torch.dtype) -> str:
        """Its name in a library."""
        module = self.make.__module__.removeprefix("topk_registry.ops.")
        return self.name or symbol(f"{module}:{self.make.__qualname__}", dtype)

    def _address(self, dtype: torch.dtype) -> int:
        c_function = kernel(self.kind.signature, self.make(PRECISIONS[dtype]), self.symbol(dtype), **self.options)
        return int(c_function.address)  # pyright: ignore[reportArgumentType]


ENTRIES: list[Entry] = []  # those of the modules that are imported


def entry(kind: CFunction = BODY, dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64)) -> Callable:
    """Decorate ``make(precision) -> function`` as an :class:`Entry`."""

    def mark(make: Callable[[Precision], Callable]) -> Entry:
        ENTRIES.append(Entry(make, kind, dtypes))
        return ENTRIES[-1]

    return mark


def exp(x) -> Any:
    """exp(x), 0 below the range of normal numbers and the largest power above it."""


def power_of_2(x) -> Any:
    """2^x for x from -126 to 127, or from -1022 to 1023 in double precision."""


def expm1(x) -> Any:
    """exp(x) - 1 to full relative precision, -1 below the range of normal numbers, the largest power above it."""


def log(x) -> Any:
    """log(x) of a normal number; -inf of 0 and of denormal numbers."""


def log_of_normal(x) -> Any:
    """log(x) of a positive normal number."""


def log1p(x) -> Any:
    """log(1 + x), for x above -1."""


def log_not_of(p) -> Any:
    """log(1 - p) of p from 0 to 1/2, to full relative precision: -2 artanh(p / (2 - p))."""


@overload(exp, **_OPTIONS)
def _exp(x):
    if x == types.float32:

        def single(x):
            u = np.float32(88) if x > np.float32(88) else x
            u = np.float32(-87) if u < np.float32(-87) else u
            return np.float32(0) if u == np.float32(-87) else exp32(u)

        return single

    def double(x):
        u = 709.0 if x > 709.0 else x
        u = -708.0 if u < -708.0 else u
        return 0.0 if u == -708.0 else exp64(u)

    return double


@overload(power_of_2, **_OPTIONS)
def _power_of_2(x):
    return (lambda x: power_of_2_32(x)) if x == types.float32 else (lambda x: power_of_2_64(x))


@overload(log_of_normal, **_OPTIONS)
def _log_of_normal(x):
    return (lambda x: log32(x)) if x == types.float32 else (lambda x: log64(x))


@overload(expm1, **_OPTIONS)
def _expm1(x):
    if x == types.float32:

        def single(x):
            u = np.float32(88) if x > np.float32(88) else x
            return expm1_32(np.float32(-87) if u < np.float32(-87) else u)

        return single

    def double(x):
        u = 709.0 if x > 709.0 else x
        return expm1_64(-708.0 if u < -708.0 else u)

    return double


@overload(log, **_OPTIONS)
def _log(x):
    if x == types.float32:

        def single(x):
            logarithm = log32(x)
            logarithm = np.float32(-np.inf) if x < np.float32(1.2e-38) else logarithm
            return logarithm if x == x else x

        return single

    def double(x):
        logarithm = log64(x)
        logarithm = -np.inf if x < 2.3e-308 else logarithm
        return logarithm if x == x else x

    return double


@overload(log1p, **_OPTIONS)
def _log1p(x):
    real = np.float32 if x == types.float32 else np.float64
    zero, one, two = real(0), real(1), real(2)

    def rounded(x) -> Any:
        # log(u + r) = log(u) + r / u, r being what rounding 1 + x to u has lost; up to u = 2, r will do for r / u, and
        # from there on r / u is below the rounding of log(u)
        u = one + x
        lost = x - (u - one)
        return log(u) + (lost if u < two else zero)

    return rounded


@overload(log_not_of, **_OPTIONS)
def _log_not_of(p):
    # the first term that is left out is y^8 / 17 of a sum of 1 and more, or y^18 / 37, y up to 1/9
    real, last = (np.float32, 15) if p == types.float32 else (np.float64, 35)
    terms, two = tuple(real(1 / j) for j in range(last, 0, -2)), real(2)

    def log_not_of(p) -> Any:
        z = p / (two - p)
        y = z * z
        series = terms[0]
        for j in range(1, len(terms)):
            series = series * y + terms[j]
        return -(z + z) * series

    return log_not_of


def _is_slow(value: object) -> bool:
    return any(value is slow for slow in FAST)


FAST = {math.exp: exp, math.expm1: expm1, math.log: log, math.log1p: log1p}
_MATH = ModuleType("math", "The module math with the functions of this file in place of its own.")
_MATH.__dict__.update({name: FAST[one] if _is_slow(one) else one for name, one in vars(math).items()})


def vectorised(function: Callable, real: type) -> Callable:
    """A function of plain floats, compiled for one precision: its constants in that precision, and the elementary
    functions of this file in place of those of ``math``."""
    assert isinstance(function, FunctionType)
    code, seen = function.__code__, function.__globals__
    used = {name: seen[name] for name in code.co_names if name in seen}
    faster = {name: _MATH if one is math else FAST[one] for name, one in used.items() if one is math or _is_slow(one)}
    constants = tuple(real(one) if isinstance(one, float) else one for one in code.co_consts)
    return njit(**_INLINE)(FunctionType(code.replace(co_consts=constants), {**seen, **faster}, function.__name__))
