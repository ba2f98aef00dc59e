"""Compilation settings of the CPU kernels, and elementary functions that compile to vector instructions."""
# pyright: reportCallIssue=false, reportArgumentType=false
# numba's intrinsics are called without their first parameter

import math
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic
from numpy.polynomial import Chebyshev, Polynomial

# "contract": a product and a sum may become one instruction. "reassoc", only in `summing`: sums may be reordered.
# No option may change a difference of two scores, because the kernels rely on exact differences.
FASTMATH: dict[str, Any] = {"error_model": "numpy", "fastmath": {"contract"}}
_COMMON = FASTMATH | {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}  # only kernels call these functions
compiled = njit(_nrt=True, **_COMMON)
# `borrowing` and `inlined` functions allocate no memory and return no array, so they need no reference counts (_nrt)
borrowing = njit(_nrt=False, **_COMMON)
summing = njit(_nrt=False, **_COMMON | {"fastmath": {"contract", "reassoc"}})
inlined = njit(forceinline=True, _nrt=False, **_COMMON)

# A kernel initializes a variable with ZERO instead of 0, because numba compiles a function again per literal argument.
ZERO = np.int64(0)
LOG2E = 1 / math.log(2)
LN2_HIGH, LN2_LOW = 0.693359375, -2.1219444005469058277e-4  # log 2 is the sum; a small multiple of LN2_HIGH is exact
INVERSE_FACTORIALS = tuple(1 / math.factorial(j) for j in range(14))
LN2_HIGH_32, LN2_LOW_32 = np.float32(LN2_HIGH), np.float32(LN2_LOW)
# 2^f = sum_j OF_POWER_32[j] f^j
OF_POWER_32 = tuple(np.float32(math.log(2) ** j / math.factorial(j)) for j in range(8))
# log(1 + f) = f - f^2 / 2 + f^3 (sum_j LOG_SERIES_32[j] f^j), relative error 2e-8; one division fewer than with artanh
LOG_SERIES_32 = tuple(
    Chebyshev.interpolate(
        lambda f: (np.log1p(f) - f + f * f / 2) / f**3, 7, domain=(math.sqrt(0.5) - 1, math.sqrt(2) - 1)
    )
    .convert(kind=Polynomial)
    .coef.astype(np.float32)
)
ROUND_32, ROUND = np.float32(1.5 * 2**23), 1.5 * 2**52  # adding this number rounds to an integer


def cast(source: types.Type, target: types.Type):
    """Return an intrinsic that takes a number of type ``source`` and reads its bits as a number of type ``target``."""

    @intrinsic
    def _cast(typing_context, number):
        def codegen(context, builder, signature, arguments):
            return builder.bitcast(arguments[0], context.get_value_type(target))

        return target(source), codegen

    return _cast


bits_32, number_32 = cast(types.float32, types.int32), cast(types.int32, types.float32)
bits_64, number_64 = cast(types.float64, types.int64), cast(types.int64, types.float64)


def _reorder(integer: bool) -> Any:

    @intrinsic
    def reorder(typing_context, number):
        width = number.bitwidth
        place, real = (types.int32, types.float32) if width == 32 else (types.int64, types.float64)

        def codegen(context, builder, signature, arguments):
            kind = context.get_value_type(place)
            bits = builder.bitcast(arguments[0], kind)
            flipped = builder.and_(builder.ashr(bits, kind(width - 1)), kind((1 << (width - 1)) - 1))
            return builder.bitcast(builder.xor(bits, flipped), context.get_value_type(place if integer else real))

        return (place if integer else real)(number), codegen

    return reorder


# place_of(x) maps a float to an integer such that the order is kept, and number_at(i) maps the integer back. This helps
# because the compiler vectorizes a maximum of integers, but no maximum of floats.
place_of, number_at = _reorder(True), _reorder(False)


@borrowing
def exp64(u):
    """Return exp(u) for u from -708 to 709, with a relative error of about 2e-16."""
    # exp(u) = 2^m exp(f) = 2^m (1 + e f) with an integer m
    shifted = u * LOG2E + ROUND
    m = shifted - ROUND
    f = (u - m * LN2_HIGH) - m * LN2_LOW
    e = INVERSE_FACTORIALS[13]
    for j in range(12):
        e = e * f + INVERSE_FACTORIALS[12 - j]
    return (e * f + 1.0) * number_64((bits_64(shifted) + np.int64(1023)) << np.int64(52))


@borrowing
def power_of_2_32(u):
    """Return 2^u for u from -126 to 127. Apart from float32 rounding, the relative error is about 6e-9."""
    shifted = u + ROUND_32
    f = u - (shifted - ROUND_32)
    e = OF_POWER_32[7]
    for j in range(7):
        e = e * f + OF_POWER_32[6 - j]
    return e * number_32((bits_32(shifted) + np.int32(127)) << np.int32(23))


@borrowing
def log32(x):
    """Return log(x) for positive normal numbers x."""
    # log(x) = e log 2 + log(1 + f) with an integer e, and 1 + f = x / 2^e from 1 / sqrt(2) to sqrt(2)
    e = (bits_32(x) - np.int32(0x3F3504F3)) >> np.int32(23)
    f = number_32(bits_32(x) - (e << np.int32(23))) - np.float32(1)
    square, series = f * f, LOG_SERIES_32[7]
    for j in range(7):
        series = series * f + LOG_SERIES_32[6 - j]
    n = np.float32(e)
    return n * LN2_HIGH_32 + (n * LN2_LOW_32 + ((series * f * square - np.float32(0.5) * square) + f))


@borrowing
def copy(source, out):
    # for out[:] = source, numba would also compile broadcasting, which kernels cannot use because it needs Python
    for i in range(len(out)):
        out[i] = source[i]


@borrowing
def largest_integer(x):
    """Return the largest of the integers, but at least 0."""
    most = 0
    for i in range(len(x)):
        most = max(most, x[i])
    return most
