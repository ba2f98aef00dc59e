"""The hinge that the smooth losses share, as a function of violations and of margins."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


def soft_hinge(violation: Tensor, tau: float) -> Tensor:
    """A hinge smoothed by a temperature: tau softplus(v / tau), for every tau > 0; towards 0 it becomes max(v, 0).

    It is linear from where exp(-v / tau) is below rounding.

    Example:
        >>> soft_hinge(torch.tensor([-1.0, 0.0, 1.0]), 0.1)
        tensor([4.5399e-06, 6.9315e-02, 1.0000e+00])
    """
    tau = max(tau, 4 * torch.finfo(violation.dtype).tiny)  # 1 / tau stays finite; the loss is at its limit
    return F.softplus(violation, beta=1 / tau, threshold=40.0)


class Hinge(NamedTuple):
    """L(m) = tau softplus((alpha_y - scale m) / tau) of labels' margins m: :func:`soft_hinge` of what they lack.

    Kernels compute it on the way, with its slope, for on small batches these few numbers a row would cost as much as
    the rows themselves, an operation each. :meth:`definition` is what they compute.
    """

    alpha: Tensor  # [] or [n], contiguous
    scale: float
    tau: float

    def definition(self, margin: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """L and dL/dm of margins [B] in double precision, both in the dtype of alpha."""
        alpha = self.alpha[label] if self.alpha.ndim else self.alpha
        violation = alpha.double() - self.scale * margin
        slope = torch.sigmoid(violation / max(self.tau, 4 * torch.finfo(torch.float64).tiny)) * -self.scale
        return soft_hinge(violation, self.tau).to(alpha.dtype), slope.to(alpha.dtype)
