"""Operators on the rows of a DTensor: each rank works on the rows it holds, by the kernels of its device.

A row's result depends on nothing but that row. So a batch may stay sharded, and only sharded classes are gathered.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor


def is_distributed(t: Any) -> bool:
    """Whether t is a DTensor; imports nothing."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


def whole(t: Any) -> Tensor:
    """All of a tensor on every rank: options of a class are needed whole."""
    return t.full_tensor() if is_distributed(t) else t


def by_shards(function: Callable[..., Tensor], logits: Any, *rows: Tensor | None, axis: int = 0) -> Tensor:
    """Call ``function(logits, *rows)`` on the local rows of a DTensor [..., n], and return the DTensor of the results.

    Args:
        function: maps scores [..., n] to a tensor [..., n] or [...], row by row.
        logits: a DTensor.
        rows: more arguments that have the rows of the logits, from ``axis`` on; a plain tensor holds all of them.
    """
    from torch.distributed.tensor import DTensor, Replicate

    mesh, placements = logits.device_mesh, _of_rows(logits)

    def local(t: Tensor | None) -> Tensor | None:
        if t is None:
            return None
        if not isinstance(t, DTensor):
            t = DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return t.redistribute(mesh, _moved(placements, axis)).to_local()

    scores = logits.redistribute(mesh, placements).to_local(grad_placements=placements)
    found = function(scores, *map(local, rows))
    size = torch.empty(logits.shape[: found.ndim], device="meta")
    return DTensor.from_local(found, mesh, placements, run_check=False, shape=size.shape, stride=size.stride())


def generator_of_shard(logits: Any, generator: Generator | None) -> Generator:
    """A generator for the rows of this rank: the same on ranks with the same rows, another on every other."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = logits.device_mesh
    drawn = torch.randint(2**62, (1,), generator=generator, device=logits.device)
    # run_check: every rank takes the number of the first
    seed = int(DTensor.from_local(drawn, mesh, [Replicate()] * mesh.ndim, run_check=True).to_local())
    for size, place, placement in zip(mesh.shape, mesh.get_coordinate(), _of_rows(logits), strict=True):
        seed = seed * size + (place if placement.is_shard() else 0)
    return torch.Generator(logits.device).manual_seed(seed % 2**63)


def _of_rows(logits: Any) -> list[Any]:
    """The placements of the logits, with the classes of every row together."""
    from torch.distributed.tensor import Replicate, Shard

    given = logits.placements
    return [p if type(p) is Shard and p.dim % logits.ndim != logits.ndim - 1 else Replicate() for p in given]


def _moved(placements: list[Any], axis: int) -> list[Any]:
    from torch.distributed.tensor import Shard

    return [Shard(p.dim + axis) if p.is_shard() else p for p in placements]
