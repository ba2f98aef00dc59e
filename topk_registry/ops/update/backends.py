"""The backends of an optimizer's step on rows, and where each serves."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from topk_registry.ops.backend import Backend, Operator, trial_in
from topk_registry.ops.cpu.entries import reject
from topk_registry.ops.cpu.library import is_prebuilt
from topk_registry.ops.update.definition import RandomBits
from topk_registry.ops.update.rules import Rule

COMPILED = (torch.float32, torch.bfloat16)  # weights that a kernel is made for


class State(NamedTuple):
    """A state of an optimizer for the rows of a step."""

    values: Tensor  # [m, d] in float32, bfloat16 or the step's precision; codes in uint8
    scales: Tensor | None = None  # of codes
    signed: bool = True  # whether one of 8 bits is the sign


class Update(NamedTuple):
    """Rule, settings, count and random bits that the steps of all rows share in one update of a matrix."""

    rule: Rule
    group: dict[str, Any]  # of the optimizer's parameters
    count: int  # of updates, from 1
    bits: RandomBits


@dataclass(frozen=True)
class Kernels:
    """The functions of a backend."""

    step: Callable[[Tensor, Tensor, list[State], Update, int], None]
    """(rows [m, d], their gradient in the step's precision, their states, update, place of the first row in the matrix)

    Changes the rows and the states in place.
    """


OPERATOR: Operator[Kernels] = Operator(
    "update",
    {
        "numba": Backend(
            "numba",
            "topk_registry.ops.update.numba.backend",
            "numba",
            lambda device, dtype: device.type == "cpu" and dtype in COMPILED,
            "weights in float32 or bfloat16 on the CPU",
            is_prebuilt=is_prebuilt,
            reject=reject,
        ),
        "torch": Backend(
            "torch", "topk_registry.ops.update.torch.backend", None, lambda device, dtype: True, "weights everywhere"
        ),
    },
    trial_in("topk_registry.ops.update.trial"),
    (torch.float32,),
    "chunked updates are",
)
