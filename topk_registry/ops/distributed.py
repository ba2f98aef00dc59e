"""Collectives with gradients, errors that every rank raises, and DTensors with sharded rows.

Every rank of a group must call the same functions in the same order. Some functions wait for numbers from other ranks,
so ``outside_graphs`` ends a compiled graph before them.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Generator, Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

Group = Any  # torch.distributed.ProcessGroup, which is missing in builds without torch.distributed
outside_graphs = _disable_dynamo  # torch.compiler.disable would import the compiler


def _functional() -> Any:
    from torch.distributed import _functional_collectives

    return _functional_collectives


def _named(group: Group) -> Any:
    return dist.group.WORLD if group is None else group


def all_gather(x: Tensor, group: Group) -> Tensor:
    """Stack a tensor of the same shape from every rank: [...] -> [ranks, ...]."""
    ranks = dist.get_world_size(group)
    if not x.numel():
        return x.new_empty(ranks, *x.shape)
    flat = x.detach().reshape(1, -1).contiguous()
    return _functional().all_gather_tensor(flat, 0, _named(group)).view(ranks, *x.shape)


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """Return the sum of a tensor over the ranks."""
    return _functional().all_reduce(x.detach(), "sum", _named(group)) if x.numel() else x


def gather_rows(x: Tensor, sizes: Sequence[int], group: Group) -> Tensor:
    """Gather the rows of all ranks in the order of ranks: [B_r, ...] -> [sum of sizes, ...].

    In the backward pass, the gradient of a row is summed over ranks and returned to the rank of the row.
    """
    most = max(sizes)
    if not most or 0 in x.shape[1:]:
        return x.new_empty(sum(sizes), *x.shape[1:])
    padded = F.pad(x.flatten(1) if x.ndim > 1 else x[:, None], (0, 0, 0, most - len(x))).contiguous()
    gather = _functional().all_gather_tensor_autograd if x.requires_grad else _functional().all_gather_tensor
    parts = gather(padded, 0, _named(group)).view(len(sizes), most, *x.shape[1:])
    return parts.flatten(0, 1) if min(sizes) == most else torch.cat([p[:n] for p, n in zip(parts, sizes, strict=True)])


class OwnRows(torch.autograd.Function):
    """Select the rows of this rank from the rows of all ranks. The backward pass gathers the gradients of all ranks."""

    @staticmethod
    def forward(ctx, x: Tensor, sizes: Sequence[int], group: Group) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.sizes, ctx.group = sizes, group
        return x.split(list(sizes))[dist.get_rank(group)].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, g: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return gather_rows(g, ctx.sizes, ctx.group), None, None


def agreed(
    check: Callable[[], Mapping[str, float]], group: Group, device: torch.device, *, may_differ: Sequence[str] = ()
) -> dict[str, list[float]]:
    """Exchange arguments between ranks. If a rank has an error or two ranks disagree, raise on all ranks.

    Args:
        check: function that checks the arguments of this rank and returns numbers by name. It may raise a ValueError.
        may_differ: names of numbers that may differ between ranks.

    Returns:
        The numbers of all ranks by name.
    """
    error, own = None, {}
    try:
        own = check()
    except (TypeError, ValueError) as raised:
        error = raised
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (own, None if error is None else str(error)), group=group)
    if error is not None:
        raise error
    for rank, (_, message) in enumerate(everyone):
        if message is not None:
            raise ValueError(f"rank {rank} of the process group: {message}")
    of_ranks = {name: [numbers[name] for numbers, _ in everyone] for name in own}
    for name, values in of_ranks.items():
        if name not in may_differ and len(set(values)) > 1:
            raise ValueError(f"ranks of the process group disagree on {name}: {values}")
    return of_ranks


def is_distributed(t: Any) -> bool:
    """Return whether t is a DTensor, without importing anything."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


def whole(t: Any) -> Tensor:
    """Gather a DTensor on every rank. Return any other tensor unchanged."""
    return t.full_tensor() if is_distributed(t) else t


def everywhere(t: Any, mesh: Any) -> Any:
    """Return a tensor that is replicated on all ranks of a mesh as a DTensor. Return a DTensor unchanged."""
    from torch.distributed.tensor import DTensor, Replicate

    return t if isinstance(t, DTensor) else DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim, run_check=False)


def beside(t: Tensor, scores: Any) -> Any:
    """Return a replicated tensor in a form that combines with ``scores``: a DTensor if ``scores`` is one."""
    return everywhere(t, scores.device_mesh) if is_distributed(scores) else t


def by_shards(function: Callable[..., Tensor], logits: Any, *rows: Tensor | None, axis: int = 0) -> Tensor:
    """Call ``function(logits, *rows)`` on the local rows of a DTensor [..., n], and return a DTensor of the results.

    Args:
        function: maps scores [..., n] to a tensor [..., n] or [...], row by row.
        logits: a DTensor.
        rows: further arguments with one entry per row of the logits, from dimension ``axis`` on. A plain tensor must
            have the rows of all ranks.
    """
    from torch.distributed.tensor import DTensor, Shard

    mesh, placements = logits.device_mesh, _of_rows(logits)
    moved = [Shard(p.dim + axis) if p.is_shard() else p for p in placements]
    local = [None if t is None else everywhere(t, mesh).redistribute(mesh, moved).to_local() for t in rows]
    part = function(logits.redistribute(mesh, placements).to_local(grad_placements=placements), *local)
    size = torch.empty(logits.shape[: part.ndim], device="meta")
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=size.shape, stride=size.stride())


def generator_of_shard(logits: Any, generator: Generator | None) -> Generator:
    """Return a generator for the rows of this rank, with the same seed on ranks that have the same rows only."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = logits.device_mesh
    drawn = torch.randint(2**62, (1,), generator=generator, device=logits.device)
    # run_check: every rank uses the number of the first rank
    seed = int(DTensor.from_local(drawn, mesh, [Replicate()] * mesh.ndim, run_check=True).to_local())
    for size, place, placement in zip(mesh.shape, mesh.get_coordinate(), _of_rows(logits), strict=True):
        seed = seed * size + (place if placement.is_shard() else 0)
    return torch.Generator(logits.device).manual_seed(seed % 2**63)


def _of_rows(logits: Any) -> list[Any]:
    """Return the placements of the logits such that each row is on one rank."""
    from torch.distributed.tensor import Replicate, Shard

    given = logits.placements
    return [p if type(p) is Shard and p.dim % logits.ndim != logits.ndim - 1 else Replicate() for p in given]
