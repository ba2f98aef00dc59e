"""The smoothed hinge loss."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


def invertible(temperature: float, dtype: torch.dtype) -> float:
    """Return ``temperature``, but at least a tiny number whose reciprocal is finite in ``dtype``.

    At this tiny temperature, smoothed margins and hinges are already equal to their limits for temperature 0.
    """
    return max(temperature, 4 * torch.finfo(dtype).tiny)


def soft_hinge(violation: Tensor, tau: float) -> Tensor:
    """Return the smoothed hinge tau softplus(v / tau) of violations v. For tau near 0, this is about max(v, 0).

    Example:
        >>> soft_hinge(torch.tensor([-1.0, 0.0, 1.0]), 0.1)
        tensor([4.5399e-06, 6.9315e-02, 1.0000e+00])
    """
    return F.softplus(violation, beta=1 / invertible(tau, violation.dtype), threshold=40.0)


class Hinge(NamedTuple):
    """Smoothed hinge L(m) = tau softplus((alpha_y - scale m) / tau) of the margin m of a label y.

    The margin m says how far the score of y is above the scores of the other classes. The product of ``scale`` and m is
    compared with alpha_y, the required margin. tau is the temperature of the smoothing. Kernels compute L and dL/dm.
    The method :meth:`definition` computes the same numbers by PyTorch operations.
    """

    alpha: Tensor  # required margin: one number [], or one per class [n], contiguous
    scale: float
    tau: float  # smoothing temperature

    def definition(self, margin: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss L and its derivative dL/dm, both [B], for margins m [B] in float64 and labels [B]."""
        alpha = self.alpha[label] if self.alpha.ndim else self.alpha
        violation = alpha.double() - self.scale * margin
        slope = torch.sigmoid(violation / invertible(self.tau, torch.float64)) * -self.scale
        return soft_hinge(violation, self.tau).to(alpha.dtype), slope.to(alpha.dtype)
