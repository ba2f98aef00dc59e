"""Functions that compare 64 numbers with bounds at once. The 64 results are the bits of one integer."""
# pyright: reportCallIssue=false, reportArgumentType=false
# numba's intrinsics are called without their first parameter

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from topk_registry.ops.cpu.numbers import compiled


def numbers_from(context, builder, array_type, array, start, count):
    """Return an LLVM vector of the ``count`` numbers ``array[start]``, ``array[start + 1]``, ..."""
    kind = context.get_value_type(array_type.dtype)
    data = context.make_array(array_type)(context, builder, array).data
    place = builder.bitcast(builder.gep(data, [start]), ir.VectorType(kind, count).as_pointer())
    vector = builder.load(place)
    vector.align = array_type.dtype.bitwidth // 8
    return vector


def repeated(builder, number, count):
    none = ir.Constant(ir.VectorType(number.type, count), ir.Undefined)
    first = builder.insert_element(none, number, ir.IntType(32)(0))
    return builder.shuffle_vector(first, none, ir.Constant(ir.VectorType(ir.IntType(32), count), [0] * count))


@intrinsic
def at_least(typing_context, numbers, start, bound):
    """Return 64 bits: bit i is 1 if ``numbers[start + i] >= bound``."""

    def codegen(context, builder, signature, arguments):
        left = numbers_from(context, builder, signature.args[0], arguments[0], arguments[1], 64)
        return builder.bitcast(builder.fcmp_ordered(">=", left, repeated(builder, arguments[2], 64)), ir.IntType(64))

    return types.uint64(numbers, types.int64, numbers.dtype), codegen


@intrinsic
def within(typing_context, numbers, start, bounds, of_bounds):
    """Return 64 bits: bit i is 1 if ``numbers[start + i] <= bounds[of_bounds + i]``. The numbers are bytes."""

    def codegen(context, builder, signature, arguments):
        left = numbers_from(context, builder, signature.args[0], arguments[0], arguments[1], 64)
        right = numbers_from(context, builder, signature.args[2], arguments[2], arguments[3], 64)
        return builder.bitcast(builder.icmp_unsigned("<=", left, right), ir.IntType(64))

    return types.uint64(numbers, types.int64, bounds, types.int64), codegen


@intrinsic
def lowest_bit(typing_context, bits):
    """Return the index of the lowest bit that is 1, or 64 if all bits are 0."""

    def codegen(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.IntType(1)(0))

    return types.int64(types.uint64), codegen


@compiled
def places_from(x, bound, where):
    """Write to ``where`` the first indices i with ``x[i] >= bound``, and return how many are written."""
    n, count, most = len(x), 0, len(where)
    for start in range(0, n - 63, 64):
        bits = at_least(x, start, bound)
        while bits != 0 and count < most:
            where[count] = start + lowest_bit(bits)
            count += 1
            bits &= bits - np.uint64(1)
    for i in range(n - n % 64, n):
        if x[i] >= bound and count < most:
            where[count] = i
            count += 1
    return count
