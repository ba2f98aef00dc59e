"""Decide whether a kernel may read a tensor, and convert tensors to the layout of kernels.

A kernel reads memory at an address. Only a plain tensor has such memory. A plain tensor is not traced, not wrapped by a
transform such as ``torch.func.vmap``, and not of a subclass of Tensor.
"""

from contextlib import nullcontext
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import (
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    is_legacy_batchedtensor,
)
from torch.autograd import forward_ad

PLAIN = (Tensor, torch.nn.Parameter)
NUMBERS = frozenset((bool, int, float, type(None)))


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


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a Triton kernel with ``args`` on a grid of programs. ``args[0]`` is a tensor on the device of the kernel.

    Raise a TypeError if an argument is a tensor that is on another device or is not plain and contiguous.
    """
    device, seen = args[0].device, None
    for value in (*args, *options.values()):
        if type(value) in NUMBERS or value is seen or not isinstance(value, Tensor):
            continue
        seen = value  # an unused argument is often the previous argument
        _check_contiguous(value)
        if value.device != device:
            raise TypeError(f"a kernel on {device} got a tensor on {value.device}")
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    with torch.cuda.device(device) if elsewhere else nullcontext():
        kernel[grid](*args, **options)


def _check_contiguous(t: Tensor) -> None:
    if not is_plain(t) or t.is_meta or t.is_neg() or not t.is_contiguous():
        raise TypeError(
            f"a kernel needs plain contiguous memory, got {type(t).__name__} "
            f"{list(t.shape)} with strides {t.stride()} on {t.device}"
        )
