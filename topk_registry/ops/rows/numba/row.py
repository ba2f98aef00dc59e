"""Declare the kernel of one row."""
# pyright: reportCallIssue=false, reportArgumentType=false
# numba's intrinsics are called without their first parameter

from collections.abc import Callable

import numpy as np

from topk_registry.ops.cpu.functions import Entry, entry, function_type
from topk_registry.ops.cpu.memory import array
from topk_registry.ops.cpu.numbers import merged

# double row(n, s, m, y, mass, b, numbers, tensors, room, g): the loss of scores s [n], and its gradient in g [n].
# y >= 0: the label, of this mass. y < 0: masses m [n], which add up to ``mass``. b is the row's place in the batch,
# numbers and operands (addresses, of functions and then of tensors) are the kernel's own. room has ROOMS * n numbers to
# work with, and one that is 0 before a thread's first row and then stays as it was left, for a guess that makes the
# next row quicker.
# fmt: off
ROW = function_type(
    "double", "int64", "pointer", "pointer", "int64", "double", "int64", "pointer", "pointer", "pointer", "pointer",
)
# fmt: on
call_row = ROW.call
ROOMS = 6


def kernel_of_row(numbers: int = 0, operands: int = 0) -> Callable[[Callable], Entry]:
    """Decorate ``kernel(s, m, y, mass, b, number, at, room, g) -> loss``, a family's kernel of one row.

    It is given arrays: scores s, masses m and the gradient g to write [n], its own numbers [``numbers``], the addresses
    of its operands [``operands``], and ``room`` [ROOMS n + 1]; see above for all of them.
    """

    def mark(kernel: Callable) -> Entry:
        declared = _declared(kernel, kernel.__qualname__, numbers, operands, True)
        _kernels[declared] = kernel, numbers, operands
        return declared

    return mark


def of_label(row: Entry) -> Entry:
    """Declare the same kernel for rows that have a label each. Its m is None: what only masses need is not compiled."""
    kernel, numbers, operands = _kernels[row]
    return _declared(kernel, f"{kernel.__qualname__}_of_label", numbers, operands, False)


_kernels: dict[Entry, tuple[Callable, int, int]] = {}


def _declared(kernel: Callable, name: str, numbers: int, operands: int, masses: bool) -> Entry:
    of_arrays = merged(kernel)

    def make(precision):
        real = precision.real

        def body(n, s, m, y, mass, b, own, addresses, room, g):
            return of_arrays(
                array(s, n, real), array(m, n, real) if masses else None, y, mass, b,
                array(own, numbers, np.float64), array(addresses, operands, np.int64),
                array(room, ROOMS * n + 1, real), array(g, n, real),
            )  # fmt: skip

        return body

    make.__module__, make.__qualname__ = kernel.__module__, name
    return entry(ROW)(make)
