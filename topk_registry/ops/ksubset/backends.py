"""Which implementations there are, where each serves, and which one serves here. What is loaded is loaded when used."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch

from topk_registry.ops import optional
from topk_registry.ops.hinge import Hinge


@dataclass(frozen=True)
class Backend:
    """An implementation, see dispatch.py for its functions."""

    module: str
    needs: str | None  # a package
    serves: Callable[[torch.device, int, bool], bool]  # the device, k after the complement, double precision or not
    where: str  # the same in words
    takes_half: bool = False  # or has single precision made of it
    checks_labels: bool = False  # gives NaN for one out of range, or has it checked before


def _on_gpu(device: torch.device, k: int, double: bool) -> bool:
    return device.type == "cuda" and not double and k <= 64 and optional.recent_gpu(device)


TABLE = {
    "numba": Backend(
        "numba.backend",
        "numba",
        lambda device, k, double: device.type == "cpu" and k <= 256,  # tables of k^2 numbers leave the cache beyond
        "the CPU and k or n - k up to 256",
        checks_labels=True,
    ),
    "triton": Backend(
        "triton.backend",
        "triton",
        _on_gpu,
        "GPUs of compute capability 8.0 and up, half or single precision, and k or n - k up to 64",
        takes_half=True,
        checks_labels=True,
    ),
    "torch": Backend("torch.all_classes", None, lambda device, k, double: True, "everything"),
}


def choose(impl: str, device: torch.device, k: int, double: bool) -> str:
    """The name of the implementation to use: ``impl``, or for "auto" the first that serves and works."""
    if impl == "auto":
        return next(name for name in TABLE if TABLE[name].serves(device, k, double) and _works(name, device, double))
    if impl not in TABLE:
        raise ValueError(f"impl must be 'auto' or one of {', '.join(map(repr, TABLE))}, got {impl!r}")
    if not TABLE[impl].serves(device, k, double):
        raise ValueError(f"impl {impl!r} is for {TABLE[impl].where}: {device}, {k}")
    return impl


def load(name: str) -> ModuleType:
    return optional.load(_module(name))


def _works(name: str, device: torch.device, double: bool) -> bool:
    needs = TABLE[name].needs
    if needs is None:
        return True
    return optional.works(_module(name), needs) and optional.runs(needs, _trial, name, device, double)


def _trial(name: str, device: torch.device, double: bool) -> bool:
    """Whether an implementation gives the torch path's results on a few scores. It is not the kernels that are tried
    here, tests do that, but what they need on this machine: compilers, a driver, a place for what is compiled."""
    s, label, k, theta = torch.linspace(0, 30, 39).sin().view(3, 13), torch.tensor([0, 6, 12]), 2, 0.5
    dtype = torch.float64 if double else torch.float32
    found = load(name).label_hinges(
        s.to(device, dtype), label.to(device), k, theta, Hinge(torch.ones((), dtype=dtype, device=device), 0.5, 0.25)
    )
    s = s.double()
    wanted = load("torch").label_hinges(s, label, k, theta, Hinge(torch.ones((), dtype=s.dtype), 0.5, 0.25))
    return all(torch.allclose(x.cpu().double(), y, rtol=1e-4, atol=1e-5) for x, y in zip(found, wanted, strict=True))


def _module(name: str) -> str:
    return f"{__package__}.{TABLE[name].module}"
