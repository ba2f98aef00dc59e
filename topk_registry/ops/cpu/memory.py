"""Memory allocation inside of kernels, and arrays at a given address.

numba would compile ``np.empty`` and ``np.zeros`` again for every dtype and number of dimensions. The intrinsics of this
module need no such compilation.
"""
# pyright: reportCallIssue=false, reportArgumentType=false
# numba's intrinsics are called without their first parameter

from collections.abc import Sequence
from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array


def numbers_at(context, builder, kind, data, lengths, owner=None):
    """Return an LLVM value: the contiguous array of numba type ``kind`` and shape ``lengths`` at the address ``data``.

    ``owner`` is the object that owns the memory. The array holds a reference to the owner, so that the memory is not
    freed while the array is in use. If ``owner`` is None, the array holds no reference.
    """
    size = context.get_abi_sizeof(context.get_data_type(kind.dtype))
    strides = [context.get_constant(types.intp, size)]
    for length in reversed(lengths[1:]):
        strides.insert(0, builder.mul(strides[0], length))
    made = context.make_array(kind)(context, builder)
    populate_array(made, data, lengths, strides, size, owner)
    return made._getvalue()


def array_type(shape: types.Type, kind: Any) -> types.Array:
    return types.Array(kind.dtype, len(shape) if isinstance(shape, types.BaseTuple) else 1, "C")


def lengths_of(context, builder, shape: types.Type, value) -> Sequence:
    """Return the lengths in a shape as LLVM values. The shape ``value`` is one length or a tuple of lengths."""
    several = isinstance(shape, types.BaseTuple)
    given = cgutils.unpack_tuple(builder, value) if several else [value]
    return [
        context.cast(builder, one, of, types.intp) for one, of in zip(given, shape if several else [shape], strict=True)
    ]


def _taken(zero: bool) -> Any:
    @intrinsic
    def taken(typing_context, shape, kind=None):
        kind = types.NumberClass(types.float64) if kind is None else kind
        kind_of_array = array_type(shape, kind)

        def codegen(context, builder, signature, arguments):
            lengths = lengths_of(context, builder, shape, arguments[0])
            stored = context.get_data_type(kind_of_array.dtype)
            size = context.get_constant(types.intp, context.get_abi_sizeof(stored))
            for length in lengths:
                size = builder.mul(size, length)
            align = context.get_constant(types.uint32, context.get_preferred_array_alignment(kind_of_array.dtype))
            owner = context.nrt.meminfo_alloc_aligned(builder, size, align)
            data = builder.bitcast(context.nrt.meminfo_data(builder, owner), stored.as_pointer())
            if zero:
                cgutils.memset(builder, data, size, 0)
            return numbers_at(context, builder, kind_of_array, data, lengths, owner)

        return kind_of_array(shape, kind), codegen

    return taken


# empty(shape, kind) and zeros(shape, kind) return a new array. The memory is freed with the last array that uses it.
# The shape is a length or a tuple of lengths. The kind is a type such as np.float64, which is the default.
empty, zeros = _taken(False), _taken(True)


@intrinsic
def _array(typing_context, address, shape, kind):
    kind_of_array = array_type(shape, kind)
    place = types.voidptr if address == types.voidptr else types.int64

    def codegen(context, builder, signature, arguments):
        pointer = context.get_data_type(kind_of_array.dtype).as_pointer()
        data = (builder.bitcast if place == types.voidptr else builder.inttoptr)(arguments[0], pointer)
        return numbers_at(context, builder, kind_of_array, data, lengths_of(context, builder, shape, arguments[1]))

    return kind_of_array(place, shape, kind), codegen


# array(address, shape, kind) returns the array at an address, like ``numba.carray``, but compiles no function. The
# address is an integer or the pointer argument of a C function. Shape and kind are as above.
array: Any = _array


@intrinsic
def _address_of(typing_context, array):
    def codegen(context, builder, signature, arguments):
        data = context.make_array(array)(context, builder, arguments[0]).data
        return builder.ptrtoint(data, context.get_value_type(types.int64))

    return types.int64(array), codegen


address_of: Any = _address_of  # address_of(array) returns the address of the first number as an integer


def _uncounted(context, builder, kind: types.Type, value):
    if isinstance(kind, types.BaseTuple):
        values = cgutils.unpack_tuple(builder, value)
        parts = [_uncounted(context, builder, one, part) for one, part in zip(kind, values, strict=True)]
        return context.make_tuple(builder, kind, parts)
    if isinstance(kind, types.Array):
        given = context.make_array(kind)(context, builder, value)
        return numbers_at(context, builder, kind, given.data, cgutils.unpack_tuple(builder, given.shape))
    return value


@intrinsic
def _borrowed(typing_context, memory):
    return memory(memory), lambda context, builder, signature, arguments: _uncounted(
        context, builder, memory, arguments[0]
    )


# borrowed(memory) returns the same array, or tuple with arrays, without reference counts. A reference count costs 10 ns
# per slice and 20 ns per argument. The caller must keep the original array as long as the result is used.
borrowed: Any = _borrowed
