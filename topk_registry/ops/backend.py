"""Choose the backend of an operator: numba on CPUs, Triton on GPUs, or PyTorch operations on any device.

Within ``use_backend(name)``, ``name`` is the backend. Otherwise, the environment variable ``TOPK_REGISTRY_BACKEND``
names the backend. The variable is read once, at the first call of an operator. If the variable is not set, an operator
uses the fastest backend that works. A backend works if it is installed and passes a self-test before its first use. If
the fastest backend does not work, one warning states the reason, and the operator uses PyTorch operations.
"""

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, TypeVar

import torch

NAMES = ("numba", "triton", "torch")
VARIABLE = "TOPK_REGISTRY_BACKEND"
OLDEST_GPU = (8, 0)  # minimum compute capability for the Triton kernels
OPERATORS = ("ksubset", "perturbed")  # topk_registry.ops.NAME.api of each defines usual_backend(device) -> str


class BackendWarning(UserWarning):
    """A loss uses PyTorch operations, because its compiled kernels do not work here."""


F = TypeVar("F", bound=Callable[..., Any])
SelfTest = Callable[[torch.device], bool]

_wanted: ContextVar[str | None] = ContextVar("topk_registry_backend", default=None)
_environment: dict[str, str] = {}  # value of the environment variable at the first call
_problems: dict[tuple[Any, ...], str] = {}  # results of self-tests: the problem, or "" if there is none


def choose(device: torch.device, backend: str | None, self_test: SelfTest) -> str:
    """Return ``backend``, or "torch" if ``backend`` is None, the user chose another backend, or the self-test fails.

    Args:
        device: device of the scores.
        backend: the backend that has a kernel for this call, "numba" or "triton". None if there is no kernel.
        self_test: function that returns whether the kernel gives correct results on a device. Called once per device.
    """
    if backend is None or preferred() not in ("auto", backend):
        return "torch"
    return backend if _serves(device, backend, self_test) else "torch"


def constant_in_graphs(function: F) -> F:
    """Make ``torch.compile`` call a function once and use the result as a constant, instead of tracing the function.

    ``torch.compiler.assume_constant_result`` does the same, but imports the compiler, which takes two seconds.
    """
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


@constant_in_graphs
def _serves(device: torch.device, backend: str, self_test: SelfTest) -> bool:
    """Return whether a backend works on a device. If the backend does not work, the first call gives a warning."""
    key = backend, device, self_test
    if (why := _problems.get(key)) is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return True  # a self-test would be captured into the CUDA graph
        why = _problems[key] = _fault(backend, device, self_test)
        if why:
            warnings.warn(
                f"{why}: the top-k losses use PyTorch operations, which are slower", BackendWarning, stacklevel=3
            )
    return not why


def _fault(backend: str, device: torch.device, self_test: SelfTest) -> str:
    """Return the reason why a backend cannot be used, or "" if the backend can be used."""
    if device.type == "cuda" and (old := too_old(device)):
        return old
    if find_spec(backend) is None:
        return f"{backend} is not installed (pip install {backend})"
    try:
        with ThreadPoolExecutor(1) as thread:  # without autocast, fake tensors and torch.func transforms of the caller
            works = thread.submit(self_test, device).result()
        return "" if works else f"{backend} is installed but its results are wrong"
    except Exception as error:
        return f"{backend} is installed but cannot be used here ({error!r})"


def check_name(name: str, what: str, names: Iterable[str] = NAMES) -> None:
    """Raise a ValueError unless ``name`` is "auto" or one of ``names``. ``what`` names the setting in the message."""
    if name not in ("auto", *names):
        raise ValueError(f"{what} must be 'auto' or one of {', '.join(map(repr, names))}, got {name!r}")


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Choose the backend of every operator within a ``with`` block, or within a decorated function.

    The choice applies only to the thread or asyncio task that enters the block. If the backend does not support a call,
    the call uses PyTorch operations.

    Args:
        name: ``"auto"`` for the fastest backend that works, ``"torch"`` for PyTorch operations only, ``"numba"`` for
            CPUs, or ``"triton"`` for GPUs.

    Example:
        >>> with use_backend("torch"):
        ...     topk_registry.functional.topk_marginals(torch.zeros(1, 4), 2)
        tensor([[0.5000, 0.5000, 0.5000, 0.5000]])
    """
    check_name(name, "backend")
    token = _wanted.set(name)
    try:
        yield
    finally:
        _wanted.reset(token)


def preferred() -> str:
    """Return the name from :func:`use_backend`, else the environment variable TOPK_REGISTRY_BACKEND, else "auto"."""
    return _wanted.get() or _from_environment()


@constant_in_graphs
def _from_environment() -> str:
    # read only once, because a lookup in os.environ takes as long as an operation on a small tensor
    if VARIABLE not in _environment:
        check_name(name := os.environ.get(VARIABLE) or "auto", VARIABLE)
        _environment[VARIABLE] = name
    return _environment[VARIABLE]


@cache
def load(module: str) -> ModuleType:
    return import_module(module)


@cache
def too_old(device: torch.device) -> str:
    """Return the reason why Triton kernels cannot run on a GPU, or "" if the kernels can run."""
    if torch.version.hip is not None:
        return "the GPU kernels are compiled for CUDA, not for ROCm"
    capability = torch.cuda.get_device_capability(device)
    needed = ".".join(map(str, OLDEST_GPU))
    missing = f"the GPU kernels need compute capability {needed}, {device} has {capability[0]}.{capability[1]}"
    return "" if capability >= OLDEST_GPU else missing


def forget_choices() -> None:
    load.cache_clear()
    _environment.clear()
    too_old.cache_clear()
    _problems.clear()


@dataclass(frozen=True)
class Record:
    """The backend of an operator on a device, and the reason for the choice."""

    operator: str  # "ksubset" or "perturbed"
    device: str  # "cpu", "cuda:0", ...
    backend: str  # the backend in use
    why: str


def report() -> list[Record]:
    """Run the self-tests of all kernels. Return one record per operator and device of this machine."""
    devices = [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]
    return [_record(name, device) for name in OPERATORS for device in devices]


def _record(operator: str, device: torch.device) -> Record:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        backend = load(f"topk_registry.ops.{operator}.api").usual_backend(device)
    fastest = "numba" if device.type == "cpu" else "triton"
    if preferred() not in ("auto", fastest):
        why = f"chosen by {VARIABLE if _wanted.get() is None else 'topk_registry.use_backend'}"
    else:
        problems = [text for key, text in _problems.items() if key[:2] == (fastest, device)]
        why = next(filter(None, problems), "the fastest backend that works")
    return Record(operator, str(device), backend, why)
