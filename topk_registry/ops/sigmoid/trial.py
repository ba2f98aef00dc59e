"""Try a backend of the row losses before it serves: on the absolute error of a few sigmoids, on a CPU on less."""

import torch

from topk_registry.ops.rows.curve import Curve
from topk_registry.ops.rows.numba.backend import RowKernel
from topk_registry.ops.sigmoid.api import sigmoid_rows
from topk_registry.ops.targets.masses import Options, Reduction


def _absolute(log_p, log_not, p, not_p, own, numbers):
    slope = p * not_p
    return not_p, -slope, p, slope


def _no_definition(log_p: torch.Tensor, log_not: torch.Tensor, own: None) -> torch.Tensor:
    raise AssertionError("a trial is of kernels")


LOSS = sigmoid_rows(Curve(_no_definition, _absolute, others=True, logarithms=False))
ON_CPU = RowKernel("rows.numba.trial:score_of_label", ())  # which the first call compiles


def trial(kernels: type, device: torch.device, wide: bool) -> bool:
    """Whether kernels find the absolute error of sigmoids of 0, on a CPU the label's score; and their gradients."""
    scores = torch.zeros(3, 8, device=device)
    label = torch.tensor([0, 3, 7], device=device)
    options = Options(label, None, 0.0, -100, Reduction.SUM)
    if device.type == "cpu":
        value, gradient = ON_CPU.run((), options, torch.arange(24.0).view(3, 8), True)
        wanted = torch.nn.functional.one_hot(label, 8)
        return value.item() == 0 + 11 + 23 and gradient is not None and bool((gradient == wanted).all())
    if LOSS.on_gpu is None or (kernel := LOSS.on_gpu()) is None:  # kernel_for would ask for a trial
        return False
    value, gradient, *_ = kernel.run(LOSS.own, options, scores, True)
    signs = torch.ones_like(scores).scatter_(1, label[:, None], -1.0)
    assert value is not None
    return bool(torch.isclose(value, 12 * signs[0, 1])) and gradient is not None and torch.allclose(gradient, signs / 4)
