"""Curves as C functions: the losses of the classes of a row, from the log-odds of each, and their slopes."""
# pyright: reportCallIssue=false, reportArgumentType=false
# numba's intrinsics are called without their first parameter

import inspect
import zlib
from collections.abc import Callable
from functools import lru_cache
from types import FunctionType
from typing import Any

import numpy as np
import torch
from numba import carray

from topk_registry.ops import openmp
from topk_registry.ops.rows.numba.compiled import c_function, function_type, vectorised

# double curve(count, log p, log(1 - p), p, 1 - p, m, M, first, numbers, own, slope): of ``count`` classes from the
# class ``first`` on, of masses m in a row of mass M, the sum of m on + (M - m) off, and their slopes in log-odds.
# fmt: off
CURVE = function_type(
    "double", "int64", "pointer", "pointer", "pointer", "pointer", "pointer", "double", "int64", "pointer", "pointer",
    "pointer",
)
# fmt: on
call_curve = CURVE.call
NUMBERS = 6  # that a curve has at most


@lru_cache
def address_of(curve: Callable, others: bool, dtype: torch.dtype) -> int:
    """The address of a curve compiled for one precision, see :class:`topk_registry.ops.rows.curve.Curve`."""
    source = f"{inspect.getsource(curve)}{openmp.edition()}"
    edition, real = zlib.crc32(source.encode()), np.float64 if dtype == torch.float64 else np.float32
    return c_function(CURVE, _body(vectorised(curve, real), others, real, edition))


def _body(curve: Callable, others: bool, real: type, edition: int) -> Callable:
    def body(count, log_p, log_not, p, not_p, m, mass, first, numbers, own, slope):
        assert edition  # part of the cache's key
        log_p, log_not = carray(log_p, count, real), carray(log_not, count, real)
        p, not_p, m = carray(p, count, real), carray(not_p, count, real), carray(m, count, real)
        number, slope = carray(numbers, NUMBERS + 1, np.float64), carray(slope, count, real)
        each = np.int64(number[0])  # 1: there is a number for each class, 0: there is not
        own = carray(own, (first + count) * each, real)[first * each :]
        x = (real(number[1]), real(number[2]), real(number[3]), real(number[4]), real(number[5]), real(number[6]))
        total, whole, zero = real(0), real(mass), real(0)
        for i in range(count):
            z = own[i] if each else zero
            if others:
                on, up, off, down = scalar(log_p[i], log_not[i], p[i], not_p[i], z, x)
                rest = whole - m[i]
                total += (m[i] * on if m[i] != zero else zero) + rest * off
                slope[i] = m[i] * up + rest * down
            else:
                on, up = scalar(log_p[i], log_not[i], p[i], not_p[i], z, x)
                total += m[i] * on if m[i] != zero else zero  # 0 times inf: a class of no mass costs nothing
                slope[i] = m[i] * up if m[i] != zero else zero
        return total

    # a global name of the body: in its closure, the compiled curve would change the cache's key in every process
    return FunctionType(body.__code__, {**globals(), "scalar": curve}, "body", None, body.__closure__)


def scalar(*_) -> Any:
    """The place of a curve in the body."""
