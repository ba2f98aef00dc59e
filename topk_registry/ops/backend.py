"""Choose the backend of an operator: numba on CPUs, Triton on GPUs, or PyTorch operations on any device.

Within ``use_backend(name)``, ``name`` is the backend. Otherwise, the environment variable ``TOPK_REGISTRY_BACKEND``
names the backend. The variable is read once, at the first call of an operator. If the variable is not set, an operator
uses the fastest backend that works. A backend works if it is installed and passes a self-test before its first use. If
the fastest backend does not work, one warning states the reason, and the operator uses PyTorch operations.

A kernel reads memory at an address. Only a plain tensor has such memory. A plain tensor is not traced, not wrapped by a
transform such as ``torch.func.vmap``, and not of a subclass of Tensor. :func:`route` decides whether kernels may run.
"""

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import (
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    is_legacy_batchedtensor,
)
from torch.autograd import forward_ad

NAMES = ("numba", "triton", "torch")
VARIABLE = "TOPK_REGISTRY_BACKEND"
OLDEST_GPU = (8, 0)  # minimum compute capability for the Triton kernels
OPERATORS = ("ksubset", "perturbed")


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
    traced = torch.compiler.is_compiling()
    wanted = preferred() if traced else _wanted.get() or _environment.get(VARIABLE) or _from_environment()
    if backend is None or wanted not in ("auto", backend):
        return "torch"
    if not traced and _problems.get((backend, device, self_test)) == "":
        return backend  # has passed its self-test
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
    if torch.version.hip is not None:  # the kernels compile for AMD GPUs, and the self-test decides
        return ""
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
        backend = load("topk_registry.ops.losses").usual_backend(operator, device)
    fastest = "numba" if device.type == "cpu" else "triton"
    if preferred() not in ("auto", fastest):
        why = f"chosen by {VARIABLE if _wanted.get() is None else 'topk_registry.use_backend'}"
    else:
        problems = [text for key, text in _problems.items() if key[:2] == (fastest, device)]
        why = next(filter(None, problems), "the fastest backend that works")
    return Record(operator, str(device), backend, why)


PLAIN = (Tensor, torch.nn.Parameter)


class Route(Enum):
    """The ways in which an operator can compute its result."""

    KERNELS = "kernels"  # by compiled kernels, because all tensors are plain
    GRAPH = "graph"  # by an operator of torch.library, because tensors have no values (traced, fake or meta)
    OPERATIONS = "operations"  # by PyTorch operations, because of a transform or a subclass of Tensor


def route(*tensors: Tensor | None) -> Route:
    """Return the way in which an operator must compute its result from these tensors.

    The way is GRAPH (a torch.library operator) if the call is traced or a tensor has no values, OPERATIONS (PyTorch
    operations) within a transform of ``torch.func`` or for a subclass of Tensor, and KERNELS for plain tensors.
    """
    if torch.compiler.is_compiling():
        return Route.GRAPH
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return Route.OPERATIONS
    if torch._C._len_torch_dispatch_stack():
        return Route.GRAPH
    way = Route.KERNELS
    for t in tensors:
        if t is None:
            continue
        if t.is_meta or (type(t) not in PLAIN and isinstance(t, torch._subclasses.FakeTensor)):
            return Route.GRAPH
        # the condition of is_plain, without a call per tensor
        if type(t) not in PLAIN or is_functorch_wrapped_tensor(t) or is_legacy_batchedtensor(t):
            way = Route.OPERATIONS
    return way


def is_plain(t: Tensor) -> bool:
    """Return whether a tensor is neither of a subclass of Tensor nor wrapped by a ``torch.func`` transform."""
    # wrappers also have the type Tensor; the second check is for torch.autograd.grad(is_grads_batched=True)
    return type(t) in PLAIN and not (is_functorch_wrapped_tensor(t) or is_legacy_batchedtensor(t))


def is_hidden(t: Tensor) -> bool:
    """Return whether a tensor has no values to read, for example within ``torch.func.vmap`` or on the meta device."""
    if torch.compiler.is_compiling():
        return False
    if t.is_meta:
        return True
    while is_functorch_wrapped_tensor(t):
        if is_batchedtensor(t):
            return True
        t = get_unwrapped(t)
    return False


def check_dense(t: Tensor, name: str) -> None:
    """Raise a ValueError if a tensor is sparse, nested or quantized. The error message contains ``name``."""
    if t.layout != torch.strided or t.is_quantized or t.is_nested:
        kind = "quantised" if t.is_quantized else "nested" if t.is_nested else str(t.layout).removeprefix("torch.")
        raise ValueError(f"{name} must be a dense tensor, got a {kind} one")


def check_device(t: Tensor, name: str, logits: Tensor) -> None:
    """Raise the error of ``torch.nn.CrossEntropyLoss`` if ``t`` is not on the device of the logits."""
    if t.device != logits.device:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {name} is on {t.device} and the logits are on "
            f"{logits.device}"
        )


def laid_out(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a contiguous tensor with the same values in ``dtype``. If ``t`` is such a tensor, return ``t``."""
    as_it_is = t.dtype == dtype and t.is_contiguous() and not t.is_neg()
    return t if as_it_is else t.detach().to(dtype).resolve_neg().contiguous()


def is_readable(t: Tensor) -> bool:
    """Return whether the values of a tensor can be read without waiting for a device, and outside of transforms."""
    return t.device.type == "cpu" and route(t) is Route.KERNELS
