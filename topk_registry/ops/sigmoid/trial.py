"""Try a backend of the row losses on the absolute error of a few sigmoids before it serves."""

import torch

from topk_registry.ops.rows.backends import Kernels
from topk_registry.ops.rows.curve import Curve
from topk_registry.ops.sigmoid.api import sigmoid_loss
from topk_registry.ops.targets.masses import Options, Reduction


def _absolute(log_p, log_not, p, not_p, own, numbers):
    slope = p * not_p
    return not_p, -slope, p, slope


def _no_definition(log_p: torch.Tensor, log_not: torch.Tensor, own: None) -> torch.Tensor:
    raise AssertionError("a trial is of kernels")


LOSS = sigmoid_loss(Curve(_no_definition, _absolute, others=True, logarithms=False))


def trial(kernels: Kernels, device: torch.device, wide: bool) -> bool:
    """Whether kernels find the absolute error of sigmoids of 0, and its gradient."""
    scores = torch.zeros(3, 8, device=device)
    label = torch.tensor([0, 3, 7], device=device)
    found = LOSS.on_gpu if scores.is_cuda else LOSS.kernel  # kernel_for would ask for a trial
    if found is None or (kernel := found()) is None:
        return False
    value, gradient, *_ = kernel.run(LOSS.own, Options(label, None, 0.0, -100, Reduction.SUM), scores, True)
    signs = torch.ones_like(scores).scatter_(1, label[:, None], -1.0)
    assert value is not None
    return bool(torch.isclose(value, 12 * signs[0, 1])) and gradient is not None and torch.allclose(gradient, signs / 4)
