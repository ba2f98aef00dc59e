"""Find compiled entries by name: in the library that came with the installation, else compiled here by numba.

An entry is a C function that Python calls, or hands to another entry: a body that threads run, the kernel of one row, a
curve. It is compiled once for each precision. Its place is ``"module:name"``, a module below ``topk_registry.ops``
and a function there that is decorated with :func:`topk_registry.ops.cpu.functions.entry`.
"""

from collections.abc import Callable
from functools import cache

import torch

from topk_registry.ops.backend import load
from topk_registry.ops.cpu.library import library
from topk_registry.ops.cpu.threads import C_BODY, Body

_addresses: dict[str, int] = {}


def address_of(name: str, compiled: Callable[[], int]) -> int:
    """Return the address of the entry with this symbol: from the library, else ``compiled()``; it is asked for once."""
    if (known := _addresses.get(name)) is None:
        known = library().get(name)
        known = _addresses[name] = compiled() if known is None else known
    return known


def address(place: str, dtype: torch.dtype) -> int:
    """Return the address of an entry for one precision.

    Raises:
        ImportError: no library has it, and numba is not installed.
    """
    module, name = place.split(":")
    return address_of(symbol(place, dtype), lambda: getattr(load(f"topk_registry.ops.{module}"), name)(dtype))


@cache
def body(place: str, dtype: torch.dtype) -> Body:
    """Return an entry that threads run, see :mod:`topk_registry.ops.cpu.threads`."""
    return C_BODY(address(place, dtype))


def reject(why: str) -> None:
    """Use the library no more: its kernels are wrong on this machine."""
    library().reject(why)
    _addresses.clear()
    body.cache_clear()


def symbol(place: str, dtype: torch.dtype) -> str:
    """The name of an entry in a library."""
    return f"{place}.{dtype}".replace(".numba", "").replace("torch.", "").replace(".", "_").replace(":", "_")
