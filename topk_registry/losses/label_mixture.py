"""Target distributions with a few labels per row, as in mixup and CutMix, plus label smoothing."""

from typing import NamedTuple

import torch
from torch import Tensor


class LabelMixture(NamedTuple):
    """One distribution over n classes per row, stored as m labels per row with one share per label.

    The probability of class c is the sum of the shares of all labels equal to c, plus u / n. The field ``uniform``
    holds u, the probability that a row spreads evenly over all n classes. The shares and u need not add up to 1. If all
    are 0, the loss of the row is 0, but the row counts in the mean. A mixture can be faster than a target [B, n].

    Example:
        >>> LabelMixture.mixed(torch.tensor([0, 2]), torch.tensor([2, 2]), 0.75).dense(3)
        tensor([[0.7500, 0.0000, 0.2500],
                [0.0000, 0.0000, 1.0000]])
    """

    labels: Tensor  # [B, m], int64: m labels per row
    shares: Tensor  # [B, m]: the probability of each label
    uniform: Tensor | None = None  # [B]: the probability that is spread evenly over all n classes; None: 0

    @classmethod
    def mixed(cls, label: Tensor, other: Tensor, lam: float | Tensor) -> "LabelMixture":
        """Return a mixture of two labels per row, as in mixup: ``label`` with share lam, ``other`` with share 1 - lam.

        Args:
            label, other: class indices [B].
            lam: one number, or one per row [B].
        """
        lam = torch.as_tensor(lam, dtype=widest(label), device=label.device).expand(len(label))
        return cls(torch.stack((label, other), 1), torch.stack((lam, 1.0 - lam), 1))

    def smooth(self, share: float) -> "LabelMixture":
        """Move a fraction ``share`` of the probability of each label to ``uniform``, and return the new mixture.

        Example:
            >>> LabelMixture.mixed(torch.tensor([0]), torch.tensor([2]), 0.75).smooth(0.4).dense(4)
            tensor([[0.5500, 0.1000, 0.2500, 0.1000]])
        """
        if not share:
            return self
        spread = share * self.shares.sum(1)
        even = spread if self.uniform is None else self.uniform + spread
        return LabelMixture(self.labels, self.shares * (1.0 - share), even)

    def wide(self) -> "LabelMixture":
        """Return the mixture in double precision, in which sums and products of shares are exact enough."""
        dtype = widest(self.shares)
        uniform = None if self.uniform is None else self.uniform.to(dtype)
        return LabelMixture(self.labels, self.shares.to(dtype), uniform)

    def check(self, rows: int) -> None:
        """Raise a ValueError unless labels, shares and uniform have ``rows`` rows and valid shapes and dtypes."""
        labels, shares, uniform = self
        good = labels.ndim == 2 and len(labels) == rows and labels.shape[1] > 0 and shares.shape == labels.shape
        good = good and labels.dtype == torch.int64 and shares.is_floating_point()
        if not good or (uniform is not None and uniform.shape != (rows,)):
            raise ValueError(
                f"expected labels int64 [{rows}, m], m > 0, shares [{rows}, m] and uniform [{rows}] or None, got "
                f"{labels.dtype} {list(labels.shape)}, {shares.dtype} {list(shares.shape)} and "
                f"{None if uniform is None else list(uniform.shape)}"
            )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "LabelMixture":
        """Return the mixture on another device."""
        device = torch.device(device)

        def moved(part: Tensor) -> Tensor:
            wide = part.dtype == torch.float64 and device.type == "mps"  # MPS does not support float64
            return part.to(device, torch.float32 if wide else part.dtype, non_blocking=non_blocking)

        labels, shares, uniform = self
        return LabelMixture(moved(labels), moved(shares), None if uniform is None else moved(uniform))

    def dense(self, n: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return the distributions as a tensor [B, n]. Without ``dtype``, the result has torch's default dtype."""
        q = self.shares.new_zeros(len(self.labels), n, dtype=dtype or torch.get_default_dtype())
        if self.uniform is not None:
            q += (self.uniform / n).to(q)[:, None]
        return q.scatter_add_(1, self.labels, self.shares.to(q))


def widest(like: Tensor) -> torch.dtype:
    return torch.float32 if like.device.type == "mps" else torch.float64  # MPS does not support float64
