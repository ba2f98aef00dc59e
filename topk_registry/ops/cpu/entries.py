"""Find compiled entries by name: in the library that came with the installation, else compiled here by numba.

An entry is a C function that Python calls, or hands to another entry: a body that threads run, the kernel of one row, a
curve. It is compiled once for each precision. Its place is ``"module:name"``, a module below ``topk_registry.ops``
and a function there that is decorated with :func:`topk_registry.ops.cpu.functions.entry`.
"""

from functools import cache

import torch

from topk_registry.ops.backend import load
from topk_registry.ops.cpu.library import library
from topk_registry.ops.cpu.threads import C_BODY, Body


@cache
def address(place: str, dtype: torch.dtype) -> int:
    """Return the address of an entry for one precision.

    Raises:
        ImportError: no library has it, and numba is not installed.
    """
    if (found := library().get(symbol(place, dtype))) is not None:
        return found
    module, name = place.split(":")
    return getattr(load(f"topk_registry.ops.{module}"), name)(dtype)


@cache
def body(place: str, dtype: torch.dtype) -> Body:
    """Return an entry that threads run, see :mod:`topk_registry.ops.cpu.threads`."""
    return C_BODY(address(place, dtype))


def symbol(place: str, dtype: torch.dtype) -> str:
    """The name of an entry in a library."""
    return f"{place}.{dtype}".replace(".numba", "").replace("torch.", "").replace(".", "_").replace(":", "_")
