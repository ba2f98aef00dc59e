"""Share the rows of a job among the threads that run a compiled body.

A body is a C function ``body(job)``. All threads run the same body with the same job. They take rows from it, a few
at a time, by :func:`spans` until none are left. The result of a row must not depend on the thread that takes it.
"""
# pyright: reportCallIssue=false, reportArgumentType=false
# numba's intrinsics are called without their first parameter

from typing import Any

from numba import njit, types
from numba.extending import intrinsic


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
def spans(job, block, count):
    """Yield (start, stop) of the rows that this thread takes, ``block`` at a time, until all ``count`` are taken."""
    start = take(job, block)
    while start < count:
        yield start, min(start + block, count)
        start = take(job, block)
