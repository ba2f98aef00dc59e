"""Contests: an operator, the cases to run it at, and the contestants that claim to compute it.

A further implementation is one more :class:`Contestant` in its operator's list; a further operator is one more file
under ``operators`` and one more entry in its table.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

Loss = Callable[[Tensor, Tensor], Tensor]  # logits [B, n], labels [B] -> scalar

CROSS_ENTROPY = "F.cross_entropy"
OURS = "topk_registry"
CONDITIONS = ("smoothing", "mixup", "cold", "graph")  # options of a case that say how it is measured


class UnavailableError(Exception):
    """A contestant cannot run here; the message says why, and what would help."""


@dataclass(frozen=True)
class Case:
    B: int
    n: int
    k: int
    options: Mapping[str, float] = field(default_factory=dict)
    device: str = "cpu"
    dtype: torch.dtype = torch.float32

    @property
    def title(self) -> str:
        options = "".join(f", {name} = {value:g}" for name, value in self.options.items())
        dtype = "" if self.dtype == torch.float32 else f", {str(self.dtype).removeprefix('torch.')}"
        return f"(B, n, k) = ({self.B}, {self.n}, {self.k}){options}{dtype}"

    @property
    def loss_options(self) -> dict[str, float]:
        """The options of the loss itself."""
        return {name: value for name, value in self.options.items() if name not in CONDITIONS}

    def inputs(self) -> tuple[Tensor, Tensor]:
        """Standard normal logits [B, n], a leaf that wants a gradient, and labels [B].

        With the option ``mixup``, that share of each target is the label of another row, as a distribution [B, n].
        """
        generator = torch.Generator(self.device).manual_seed(0)
        drawn = {"generator": generator, "device": self.device}
        logits = torch.randn(self.B, self.n, **drawn).to(self.dtype)
        labels = torch.randint(self.n, (self.B,), **drawn)
        target = labels
        if share := self.options.get("mixup", 0.0):
            one_hot = torch.nn.functional.one_hot(labels, self.n).to(torch.get_default_dtype())
            target = (1 - share) * one_hot + share * one_hot.flip(0)
        return logits.requires_grad_(), target


def _always(case: Case) -> bool:
    return True


@dataclass(frozen=True)
class Contestant:
    name: str
    build: Callable[[Case], Loss]
    takes_part: Callable[[Case], bool] = _always  # where it has something to show


@dataclass(frozen=True)
class Operator:
    name: str
    summary: str
    contestants: Callable[[Path | None], Sequence[Contestant]]  # from the path of the authors' code, if given
    options: Sequence[Mapping[str, float]]
    shapes: Sequence[tuple[int, int, int]]
    tests: Sequence[str]  # these pass, or nothing is reported
