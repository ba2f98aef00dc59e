"""The smoothed hinge as a function of violations and of margins."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


def invertible(temperature: float, dtype: torch.dtype) -> float:
    """Return the temperature, or the smallest one with a finite reciprocal in this precision.

    At this temperature, margins and hinges already equal their limit at 0.
    """
    return max(temperature, 4 * torch.finfo(dtype).tiny)


def soft_hinge(violation: Tensor, tau: float) -> Tensor:
    """Return the hinge max(v, 0), smoothed with temperature tau > 0: tau softplus(v / tau).

    Example:
        >>> soft_hinge(torch.tensor([-1.0, 0.0, 1.0]), 0.1)
        tensor([4.5399e-06, 6.9315e-02, 1.0000e+00])
    """
    return F.softplus(violation, beta=1 / invertible(tau, violation.dtype), threshold=40.0)


class Hinge(NamedTuple):
    """Loss L(m) = tau softplus((alpha_y - scale m) / tau) of margins m of labels, with required margin alpha.

    Kernels compute the loss and its derivative together, because on small batches separate operations would cost as
    much as the pass over the scores. :meth:`definition` computes both in torch operations.
    """

    alpha: Tensor  # [] or [n], contiguous
    scale: float
    tau: float

    def definition(self, margin: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """Return L and dL/dm [B] in the dtype of alpha, for margins [B] in double precision."""
        alpha = self.alpha[label] if self.alpha.ndim else self.alpha
        violation = alpha.double() - self.scale * margin
        slope = torch.sigmoid(violation / invertible(self.tau, torch.float64)) * -self.scale
        return soft_hinge(violation, self.tau).to(alpha.dtype), slope.to(alpha.dtype)
