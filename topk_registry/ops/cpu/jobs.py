"""What compiled bodies read of a job, and how threads share its rows.

A body is a C function ``body(job)``. All threads run the same body with the same job. They take rows from it, a few
at a time, by :func:`spans` until none are left. The result of a row must not depend on the thread that takes it.
"""
# pyright: reportCallIssue=false, reportArgumentType=false
# numba's intrinsics are called without their first parameter

from typing import Any

from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from topk_registry.ops.cpu.numbers import numbers_at


@intrinsic
def _take(typing_context, job, count):
    def codegen(context, builder, signature, arguments):
        job, count = arguments
        counter = builder.bitcast(job, count.type.as_pointer())
        return builder.atomic_rmw("add", counter, count, "monotonic")

    return types.int64(types.voidptr, types.int64), codegen


# take(job, count): take the next rows of a job and return the first. Beyond the last row nothing is left to do.
take: Any = _take


@njit
def spans(job, step, count):
    """Yield (start, stop) of the rows that this thread takes, ``step`` at a time, until all ``count`` are taken."""
    start = take(job, step)
    while start < count:
        yield start, min(start + step, count)
        start = take(job, step)


@intrinsic
def _array(typing_context, address, shape, kind):
    several = isinstance(shape, types.BaseTuple)
    lengths_of = tuple(shape) if several else (shape,)
    found = types.Array(kind.dtype, len(lengths_of), "C")
    place = types.voidptr if address == types.voidptr else types.int64

    def codegen(context, builder, signature, arguments):
        first, given, _ = arguments
        given = cgutils.unpack_tuple(builder, given) if several else [given]
        lengths = [context.cast(builder, *one, types.intp) for one in zip(given, lengths_of, strict=True)]
        pointer = context.get_data_type(found.dtype).as_pointer()
        data = (builder.bitcast if place == types.voidptr else builder.inttoptr)(first, pointer)
        return numbers_at(context, builder, found, data, lengths)

    return found(place, shape, kind), codegen


# array(address, shape, kind): the numbers at an address, as ``numba.carray``, without a function of numba's to compile.
# The address is an integer, or what a C function is given as ``pointer``; the shape is a length, or a tuple of lengths;
# the kind is a type such as np.float64.
array: Any = _array


@intrinsic
def _address_of(typing_context, array):
    def codegen(context, builder, signature, arguments):
        data = context.make_array(array)(context, builder, arguments[0]).data
        return builder.ptrtoint(data, context.get_value_type(types.int64))

    return types.int64(array), codegen


address_of: Any = _address_of  # address_of(array): the address of its first number, an integer
