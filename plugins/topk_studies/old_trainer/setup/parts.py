"""Parts of a run that a caller may bring instead of having them built from the configuration."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Parts:
    """A caller's own parts; None has the part built from the configuration.

    Args:
        model: maps images [B, ...] to scores [B, n].
        train_loader, eval_loader: yield (images, labels), as a ``torch.utils.data.DataLoader`` does.
        optimizer: over the model's parameters.
    """

    model: nn.Module | None = None
    train_loader: Iterable[Any] | None = None
    eval_loader: Iterable[Any] | None = None
    optimizer: torch.optim.Optimizer | None = None

    @property
    def any(self) -> bool:
        """Whether there is one."""
        return any(part is not None for part in vars(self).values())
