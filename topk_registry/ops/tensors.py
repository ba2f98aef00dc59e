"""Say how the numbers of a tensor may be reached, and hand them to kernels.

Kernels read and write memory by its address. That is right only for a tensor that is plain memory of its device, in the
layout the kernel expects. :func:`route` decides which tensors may reach a kernel, :func:`operand` brings an argument
into the layout, and :func:`address`, :func:`own_address` and :func:`launch` alone let go of an address.
"""

from collections.abc import Sequence
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
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # of scores that kernels read


class Route(Enum):
    """The ways through an operator."""

    KERNELS = "kernels"  # plain memory: compiled code reads it
    GRAPH = "graph"  # no numbers yet (traced, fake, meta): a node that torch.library knows
    OPERATIONS = "operations"  # numbers behind a transform or a subclass: torch operations alone


def route(*tensors: Tensor | None) -> Route:
    """Choose the way for a call with these tensors."""
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
        if t.is_meta or _is_fake(t):
            return Route.GRAPH
        if not is_plain(t):
            way = Route.OPERATIONS
    return way


def readable(scores: Tensor, target: Tensor | Sequence[Tensor | None], weight: Tensor | None = None) -> bool:
    """Whether kernels of rows can read these: plain memory of one device, in shapes that belong together.

    The target is class indices [B], masses [B, n] or the parts of a :class:`LabelMixture`, and gets no gradient. What
    is not readable goes through torch operations, which check it and say what is wrong.
    """
    if scores.ndim != 2 or scores.shape[1] < 2 or scores.dtype not in DTYPES:
        return False
    parts, device = target, scores.device
    if isinstance(target, Tensor):
        if target.shape != (scores.shape if target.is_floating_point() else scores.shape[:1]):
            return False
        parts = (target,)
    for part in parts:
        if part is not None and (part.requires_grad or part.device != device or part.dtype == torch.bool):
            return False
    if weight is not None and (weight.device != device or len(weight) != scores.shape[1]):
        return False
    return route(scores, weight, *parts) is Route.KERNELS


def is_plain(t: Tensor) -> bool:
    """Whether a tensor is one of numbers: no subclass, and none that a transform wraps."""
    # wrappers are of type Tensor too; those of is_grads_batched appear outside torch.func's transforms
    return type(t) in PLAIN and not (is_functorch_wrapped_tensor(t) or is_legacy_batchedtensor(t))


def is_hidden(t: Tensor) -> bool:
    """Whether none of a tensor's numbers can be looked at: under ``torch.func.vmap`` it stands for many, a meta tensor
    has none."""
    if torch.compiler.is_compiling():
        return False
    if t.is_meta:
        return True
    while is_functorch_wrapped_tensor(t):
        if is_batchedtensor(t):
            return True
        t = get_unwrapped(t)
    return False


def _is_fake(t: Tensor) -> bool:
    return type(t) not in PLAIN and isinstance(t, torch._subclasses.FakeTensor)


def check_dense(t: Tensor, name: str) -> None:
    """Raise unless a tensor is dense: not sparse, nested or quantised."""
    if t.layout != torch.strided or t.is_quantized or t.is_nested:
        kind = "quantised" if t.is_quantized else "nested" if t.is_nested else str(t.layout).removeprefix("torch.")
        raise ValueError(f"{name} must be a dense tensor, got a {kind} one")


def laid_out(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor as contiguous memory in a precision, itself where it is that."""
    as_it_is = t.dtype == dtype and t.is_contiguous() and not t.is_neg()
    return t if as_it_is else t.detach().to(dtype).resolve_neg().contiguous()


def operand(t: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an argument of a kernel as contiguous memory, a copy where it is not; raise unless it is what is wanted.

    The address of the first number does not show strides or a pending negation, as labels sliced from a matrix,
    expanded scalars and negated views have.
    """
    if t.shape != shape or t.dtype != dtype or t.device != device:
        raise ValueError(
            f"a kernel needs {dtype} {list(shape)} on {device}, got {t.dtype} {list(t.shape)} on {t.device}"
        )
    return laid_out(t, dtype)


def address(t: Tensor) -> int:
    """The address of a tensor's numbers on the CPU; raises unless they lie there one after the other."""
    _check_contiguous(t)
    if not t.is_cpu:
        raise TypeError(f"a kernel on the CPU was given a tensor on {t.device}")
    return t.data_ptr()


own_address = Tensor.data_ptr
"""The address of numbers that the caller has allocated or laid out itself, in one piece on the CPU: no checks."""


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Start a Triton kernel on a grid of programs, on the device of its first argument."""
    device, seen = args[0].device, None
    for value in (*args, *options.values()):
        if type(value) in NUMBERS or value is seen or not isinstance(value, Tensor):
            continue
        seen = value  # what a kernel does not read is often the argument before it
        _check_contiguous(value)
        if value.device != device:
            raise TypeError(f"a kernel on {device} was given a tensor on {value.device}")
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    with torch.cuda.device(device) if elsewhere else nullcontext():
        kernel[grid](*args, **options)


def _check_contiguous(t: Tensor) -> None:
    if not is_plain(t) or t.is_meta or t.is_neg() or not t.is_contiguous():
        raise TypeError(
            f"a kernel needs plain contiguous memory (see topk_registry.ops.tensors.operand), got {type(t).__name__} "
            f"{list(t.shape)} with strides {t.stride()} on {t.device}"
        )
