"""Arrays at a given address, and arrays without reference counts."""
# pyright: reportCallIssue=false, reportArgumentType=false
# numba's intrinsics are called without their first parameter

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array


@intrinsic
def _array(typing_context, address, shape, kind):
    several = isinstance(shape, types.BaseTuple)
    kind_of_array = types.Array(kind.dtype, len(shape) if several else 1, "C")
    place = types.voidptr if address == types.voidptr else types.int64

    def codegen(context, builder, signature, arguments):
        number = context.get_data_type(kind_of_array.dtype)
        data = (builder.bitcast if place == types.voidptr else builder.inttoptr)(arguments[0], number.as_pointer())
        given = cgutils.unpack_tuple(builder, arguments[1]) if several else [arguments[1]]
        kinds = shape if several else [shape]
        lengths = [context.cast(builder, one, of, types.intp) for one, of in zip(given, kinds, strict=True)]
        size = context.get_abi_sizeof(number)
        strides = [context.get_constant(types.intp, size)]
        for length in reversed(lengths[1:]):
            strides.insert(0, builder.mul(strides[0], length))
        made = context.make_array(kind_of_array)(context, builder)
        populate_array(made, data, lengths, strides, size, None)
        return made._getvalue()

    return kind_of_array(place, shape, kind), codegen


# array(address, shape, kind) returns the contiguous array at an address, like ``numba.carray``, but compiles no
# function. The address is an integer or the pointer argument of a C function. The shape is a length or a tuple of
# lengths. The kind is a type such as np.float64.
array: Any = _array


def _uncounted(context, builder, kind: types.Type, value):
    if isinstance(kind, types.BaseTuple):
        values = cgutils.unpack_tuple(builder, value)
        parts = [_uncounted(context, builder, one, part) for one, part in zip(kind, values, strict=True)]
        return context.make_tuple(builder, kind, parts)
    if isinstance(kind, types.Array):
        given = context.make_array(kind)(context, builder, value)
        given.meminfo = cgutils.get_null_value(given.meminfo.type)
        return given._getvalue()
    return value


@intrinsic
def _borrowed(typing_context, memory):
    return memory(memory), lambda context, builder, signature, arguments: _uncounted(
        context, builder, memory, arguments[0]
    )


# borrowed(memory) returns the same array, or tuple with arrays, without reference counts. A reference count costs 10
# ns per slice and 20 ns per argument. Apply it to a parameter only, because the caller keeps the original. A local
# variable would be released after its last use, which may be before the last use of the result.
borrowed: Any = _borrowed
