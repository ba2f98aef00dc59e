"""The backends of the row losses, and where each serves: torch operations are a loss's own definition."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from topk_registry.ops.backend import Backend, Operator


@dataclass(frozen=True)
class Kernels:
    """The functions of a backend."""

    run: Callable[..., tuple[Any, ...]]
    """See :func:`topk_registry.ops.rows.numba.driver.run` and :func:`topk_registry.ops.rows.triton.driver.run`."""


def _absolute(log_p, log_not, p, not_p, own, numbers):
    slope = p * not_p
    return not_p, -slope, p, slope


def trial(kernels: Kernels, device: torch.device, wide: bool) -> bool:
    """Whether kernels find the absolute error of sigmoids of 0, and its gradient."""
    from topk_registry.ops.rows.api import Options
    from topk_registry.ops.rows.curve import Curve
    from topk_registry.ops.sigmoid.api import sigmoid_loss

    scores = torch.zeros(3, 8, device=device)
    label = torch.tensor([0, 3, 7], device=device)
    kernel = sigmoid_loss(Curve(trial, _absolute, others=True, logarithms=False)).kernel_for(scores)
    if kernel is None:
        return False
    value, gradient, *_ = kernel.run(Options(label, None, 0.0, -100, 2), scores, True)
    signs = torch.ones_like(scores).scatter_(1, label[:, None], -1.0)
    assert value is not None
    return bool(torch.isclose(value, 12 * signs[0, 1])) and gradient is not None and torch.allclose(gradient, signs / 4)


# a request says whether a GPU is to compute in double precision
OPERATOR: Operator[Kernels] = Operator(
    "rows",
    {
        "numba": Backend(
            "numba",
            "topk_registry.ops.rows.numba.driver",
            "numba",
            lambda device, wide: device.type == "cpu",
            "scores on the CPU",
        ),
        "triton": Backend(
            "triton",
            "topk_registry.ops.rows.triton.driver",
            "triton",
            lambda device, wide: device.type == "cuda" and not wide,
            "GPUs of compute capability 8.0 and up, half or single precision",
            takes_half=True,
            checks_labels=True,
        ),
        "torch": Backend("torch", __name__, None, lambda device, wide: True, "everything"),
    },
    trial,
    example=(False,),
)
