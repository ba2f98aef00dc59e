"""Which implementations there are, where each serves, and which one serves here. What is loaded is loaded when used."""

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch


@dataclass(frozen=True)
class Backend:
    """An implementation, see dispatch.py for its functions."""

    module: str
    needs: str | None  # a package
    serves: Callable[[torch.device, int, bool], bool]  # the device, k after the complement, double precision or not
    where: str  # the same in words
    takes_half: bool = False  # or has single precision made of it
    checks_labels: bool = False  # gives NaN for one out of range, or has it checked before


TABLE = {
    "numba": Backend(
        "cpu",
        "numba",
        lambda device, k, double: device.type == "cpu" and k <= 256,  # tables of k^2 numbers leave the cache beyond
        "the CPU and k or n - k up to 256",
        checks_labels=True,
    ),
    "torch": Backend("composite", None, lambda device, k, double: True, "everything"),
}


def choose(impl: str, device: torch.device, k: int, double: bool) -> str:
    """The name of the implementation to use: ``impl``, or for "auto" the first that serves and works."""
    if impl == "auto":
        return next(name for name in TABLE if TABLE[name].serves(device, k, double) and _works(name))
    if impl not in TABLE:
        raise ValueError(f"impl must be 'auto' or one of {', '.join(map(repr, TABLE))}, got {impl!r}")
    if not TABLE[impl].serves(device, k, double):
        raise ValueError(f"impl {impl!r} is for {TABLE[impl].where}: {device}, {k}")
    return impl


@cache
def load(name: str) -> ModuleType:
    return importlib.import_module(f"{__package__}.{TABLE[name].module}")


@cache
def _works(name: str) -> bool:
    """Whether it can be used here; where it could serve but does not work, that is told once."""
    needs = TABLE[name].needs
    if needs is None:
        return True
    if find_spec(needs) is None:
        warnings.warn(f"{needs} is not installed, the top-k losses are slower: pip install {needs}", stacklevel=2)
        return False
    try:
        load(name)
    except Exception as error:
        warnings.warn(f"{needs} is installed but cannot be used, the top-k losses are slower: {error!r}", stacklevel=2)
        return False
    return True
