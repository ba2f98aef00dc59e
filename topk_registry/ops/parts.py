"""The target of a batch as the operators read it: the mass of each class in each row."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Parts(NamedTuple):
    """Masses: for each row of a batch and each class, the weight of the class in the target of the row.

    If ``dense`` is not None, ``dense`` holds all masses, and the other tensors are None. Otherwise, the mass of class c
    in row r is even[r] plus the sum of shares[r, j] over each j with labels[r, j] = c.
    """

    labels: Tensor | None  # [B, m], each in [0, n)
    shares: Tensor | None  # [B, m], the masses of the labels
    even: Tensor | None  # [B], a mass of every class; None stands for 0
    dense: Tensor | None  # [B, n], the mass of each class

    @classmethod
    def of(cls, masses: Any, logits: Tensor) -> "Parts":
        """Return labels, shares, even and dense of ``masses``. Raise a ValueError if shapes do not fit the logits."""
        parts = labels, shares, even, dense = cls(masses.labels, masses.shares, masses.even, masses.dense)
        rows, fits = logits.shape[:1], False
        if dense is not None:
            fits = dense.shape == logits.shape and labels is None and shares is None and even is None
        elif labels is not None and shares is not None:
            fits = labels.ndim == 2 and labels.shape[:1] == rows and shares.shape == labels.shape
            fits = fits and (even is None or even.shape == rows)
        if not fits:
            shapes = {name: t if t is None else list(t.shape) for name, t in parts._asdict().items()}
            raise ValueError(
                f"masses must be dense {list(logits.shape)} alone, or labels and shares [{rows[0]}, m] with or without "
                f"even {list(rows)}, got the shapes {shapes}"
            )
        return parts

    @property
    def has_labels_only(self) -> bool:
        return self.labels is not None and self.labels.shape[1] == 1 and self.even is None

    @property
    def needs_grad(self) -> bool:
        for part in self:  # noqa: SIM110 - a generator would be entered once per field
            if part is not None and part.requires_grad:
                return True
        return False

    def rows(self, rows: slice) -> "Parts":
        return Parts(*(None if part is None else part[rows] for part in self))

    def to(self, device: torch.device) -> "Parts":
        return Parts(*(None if part is None else part.to(device) for part in self))

    def table(self, n: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return the masses of all classes [B, n]. If ``dtype`` is None, the dtype of the stored masses is kept."""
        if self.dense is not None:
            return self.dense if dtype is None else self.dense.to(dtype)
        assert self.labels is not None
        assert self.shares is not None
        shares = self.shares if dtype is None else self.shares.to(dtype)
        even = shares.new_zeros(len(shares), 1) if self.even is None else self.even.to(shares)[:, None]
        return even.expand(-1, n).scatter_add(1, self.labels, shares)
