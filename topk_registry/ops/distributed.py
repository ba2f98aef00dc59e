"""Operators on the rows of a DTensor: each rank works on the rows it holds, by the kernels of its device.

A row's result depends on nothing but that row. So a batch may stay sharded. Sharded classes are gathered, unless the
operator takes them as they lie.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from topk_registry.ops.process_group import outside_graphs


def is_distributed(t: Any) -> bool:
    """Whether t is a DTensor; imports nothing."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


def whole(t: Any) -> Tensor:
    """Gather a DTensor on every rank; return any other tensor as it is."""
    return t.full_tensor() if is_distributed(t) else t


def everywhere(t: Any, mesh: Any) -> Any:
    """A tensor that each rank of a mesh holds whole, as a DTensor of it; a DTensor as it is."""
    from torch.distributed.tensor import DTensor, Replicate

    return t if isinstance(t, DTensor) else DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim, run_check=False)


def beside(t: Tensor, scores: Any) -> Any:
    """Make a tensor that every rank holds whole usable beside ``scores``, a DTensor or a plain tensor."""
    return everywhere(t, scores.device_mesh) if is_distributed(scores) else t


def by_shards(function: Callable[..., Tensor], logits: Any, *rows: Tensor | None, axis: int = 0) -> Tensor:
    """Call ``function(logits, *rows)`` on the local rows of a DTensor [..., n], and return the DTensor of the results.

    Args:
        function: maps scores [..., n] to a tensor [..., n] or [...], row by row.
        logits: a DTensor.
        rows: more arguments that have the rows of the logits, from ``axis`` on; a plain tensor holds all of them.
    """
    mesh, placements = logits.device_mesh, _of_rows(logits)

    scores = logits.redistribute(mesh, placements).to_local(grad_placements=placements)
    moved = _moved(placements, axis)
    part = function(scores, *(_local(t, mesh, moved) for t in rows))
    return _spread(part, mesh, placements, logits.shape[: part.ndim])


def class_dimension(logits: Any) -> int | None:
    """The one dimension of the mesh that the classes of a DTensor [B, n] are sharded over, None where there is none."""
    from torch.distributed.tensor import Shard

    sharded = [place for place, p in enumerate(logits.placements) if p.is_shard() and p.dim % logits.ndim == 1]
    return sharded[0] if len(sharded) == 1 and type(logits.placements[sharded[0]]) is Shard else None


@outside_graphs
def by_class_shards(
    function: Callable[..., Tensor], logits: Any, dimension: int, *rows: Tensor | None, cut: bool
) -> Tensor:
    """Call ``function(group, logits, *rows)`` on a rank's part of a DTensor [B, n]; return the DTensor of losses [B].

    Args:
        function: given the process group along ``dimension`` of the mesh, whose ranks hold the other classes.
        rows: more arguments, [B, ...].
        cut: they are [B, n], and are cut as the logits are.
    """
    mesh, of_rows = logits.device_mesh, _of_rows(logits)
    placements = [p if place == dimension else of_rows[place] for place, p in enumerate(logits.placements)]

    scores = logits.redistribute(mesh, placements).to_local(grad_placements=placements)
    cuts = placements if cut else of_rows
    part = function(mesh.get_group(dimension), scores, *(_local(t, mesh, cuts) for t in rows))
    return _spread(part, mesh, of_rows, logits.shape[:1])


def by_rows_of_layer(
    function: Callable[..., Tensor], features: Any, mesh: Any, dimension: int, *rows: Tensor | None
) -> Tensor:
    """Call ``function(features, *rows)`` on this rank's rows of a DTensor [B, d]: the DTensor of losses [B].

    Ranks along ``dimension`` of the mesh get the same rows, and each gives a part of the gradient of the features.
    """
    from torch.distributed.tensor import Partial, Replicate

    if features.device_mesh != mesh:
        raise ValueError(f"features and weight must lie on one mesh, got {features.device_mesh} and {mesh}")
    placements = _of_rows(features)
    placements[dimension] = Replicate()

    parts = [Partial() if place == dimension else p for place, p in enumerate(placements)]
    x = features.redistribute(mesh, placements).to_local(grad_placements=parts)
    part = function(x, *(_local(t, mesh, placements) for t in rows))
    return _spread(part, mesh, placements, features.shape[:1])


def _local(t: Tensor | None, mesh: Any, placements: list[Any]) -> Tensor | None:
    """This rank's part of a tensor that each rank holds whole, or of a DTensor; None of None."""
    return None if t is None else everywhere(t, mesh).redistribute(mesh, placements).to_local()


def _spread(part: Tensor, mesh: Any, placements: list[Any], shape: torch.Size) -> Tensor:
    from torch.distributed.tensor import DTensor

    size = torch.empty(shape, device="meta")
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=size.shape, stride=size.stride())


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
