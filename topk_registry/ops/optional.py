"""Implementations that need a package or a device: loaded and tried when used, and told of where they cannot be."""

import importlib
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

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


def runs(package: str, trial: Callable[..., bool], *args: Any) -> bool:
    """Whether kernels that load do run here: ``trial(*args)`` says whether their results are right.

    That is found out once, by a thread of its own, where fake tensors, transforms and autocast of the caller are off.
    """
    if (trial, args) not in _trials:
        if any(isinstance(arg, torch.device) and arg.type == "cuda" for arg in args) and _captures():
            return True  # a trial would break the graph off
        try:
            with ThreadPoolExecutor(1) as thread:
                right = thread.submit(trial, *args).result()
            problem = "their results are wrong"
        except Exception as error:
            right, problem = False, repr(error)
        if not right:
            warnings.warn(
                f"{package} is installed but its kernels cannot be used here, the top-k losses are slower: {problem}",
                stacklevel=2,
            )
        _trials[trial, args] = right
    return _trials[trial, args]


_trials: dict[tuple[Any, ...], bool] = {}


def _captures() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


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
    _trials.clear()
