"""The backends of the row losses, and where each serves: torch operations are a loss's own definition."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from topk_registry.ops.backend import Backend, Operator


@dataclass(frozen=True)
class Kernels:
    """The functions of a backend."""

    run: Callable[..., tuple[Tensor, Tensor | None, bool]]
    """See :func:`topk_registry.ops.rows.numba.driver.run`."""


def _absolute(log_p, log_not, p, not_p, own, numbers):
    slope = p * not_p
    return not_p, -slope, p, slope


def trial(kernels: Kernels, device: torch.device) -> bool:
    """Whether kernels find the absolute error of sigmoids of 0, and its gradient."""
    from topk_registry.ops.rows.curve import Curve
    from topk_registry.ops.sigmoid.api import sigmoid_loss

    loss = sigmoid_loss(Curve(trial, _absolute, others=True, logarithms=False))
    assert loss.kernel is not None
    address, numbers, tensors, _ = loss.kernel().prepared(torch.float32)  # pyright: ignore[reportAttributeAccessIssue]
    scores, label = torch.zeros(3, 8), torch.tensor([0, 3, 7])
    value, gradient, right = kernels.run(address, scores, label, None, 0.0, -100, 1, numbers, tensors, True)
    signs = torch.full((3, 8), 1.0).scatter_(1, label[:, None], -1.0)
    close = torch.allclose(value, torch.tensor(4.0)) and gradient is not None and torch.allclose(gradient, signs / 12)
    return right and close


OPERATOR: Operator[Kernels] = Operator(
    "rows",
    {
        "numba": Backend(
            "numba",
            "topk_registry.ops.rows.numba.driver",
            "numba",
            lambda device: device.type == "cpu",
            "scores on the CPU",
        ),
        "torch": Backend("torch", __name__, None, lambda device: True, "everything"),
    },
    trial,
)
