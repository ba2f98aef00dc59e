"""Which implementations make their own noise, where each serves, and which one serves here; they load when used.

The module of one has ``perturbed_kth(scores [rows, n], seed int64 [], k, epsilon, num_samples) -> (value [rows], index
[rows, num_samples])`` for scores in single or double precision, the seed on the same device.
"""

import importlib
import warnings
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

TABLE = {"numba": ("cpu", "cpu")}  # the package each needs: the type of device it is for, its module
EPSILONS = 1e-30, 1e30  # in single precision these can be divided by


def choose(impl: str, device: torch.device) -> str | None:
    """The implementation to use: ``impl``, or for "auto" the first that serves and works; None for the torch path."""
    if impl in TABLE and TABLE[impl][0] != device.type:
        raise ValueError(f"impl {impl!r} is for scores on {TABLE[impl][0]}, these are on {device}")
    if impl != "auto":
        return impl if impl in TABLE else None
    return next((name for name, (there, _) in TABLE.items() if there == device.type and _works(name)), None)


def fits(epsilon: float, noise: Tensor | None) -> bool:
    """Whether there is noise to be made, of a size that can be."""
    return noise is None and EPSILONS[0] <= epsilon <= EPSILONS[1]


@cache
def load(name: str) -> ModuleType:
    return importlib.import_module(f"{__package__}.{TABLE[name][1]}")


@cache
def _works(name: str) -> bool:
    """Whether it can be used here; where it could serve but does not work, that is told once."""
    if find_spec(name) is None:
        warnings.warn(f"{name} is not installed, the noised losses are slower: pip install {name}", stacklevel=2)
        return False
    try:
        load(name)
    except Exception as error:
        warnings.warn(f"{name} is installed but cannot be used, the noised losses are slower: {error!r}", stacklevel=2)
        return False
    return True
