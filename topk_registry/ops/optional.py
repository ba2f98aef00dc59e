"""Implementations that need a package or a device: loaded when used, and told of once where they cannot be."""

import importlib
import warnings
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch

OLDEST_GPU = (8, 0)  # compute capability that the Triton kernels are compiled and tested for


@cache
def load(module: str) -> ModuleType:
    return importlib.import_module(module)


@cache
def works(module: str, package: str) -> bool:
    """Whether a module of kernels can be used, which needs a package."""
    if find_spec(package) is None:
        warnings.warn(f"{package} is not installed, the top-k losses are slower: pip install {package}", stacklevel=2)
        return False
    try:
        load(module)
    except Exception as error:
        warnings.warn(
            f"{package} is installed but cannot be used, the top-k losses are slower: {error!r}", stacklevel=2
        )
        return False
    return True


@cache
def recent_gpu(device: torch.device) -> bool:
    """Whether a device is a GPU that Triton's kernels run on."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    found = torch.cuda.get_device_capability(device)
    if found < OLDEST_GPU:
        wanted = ".".join(map(str, OLDEST_GPU))
        warnings.warn(
            f"the GPU kernels need compute capability {wanted}, {device} has {found[0]}.{found[1]}: "
            "the top-k losses are slower",
            stacklevel=2,
        )
    return found >= OLDEST_GPU


def forget() -> None:
    """Look again at what is installed."""
    for remembered in (load, works, recent_gpu):
        remembered.cache_clear()
