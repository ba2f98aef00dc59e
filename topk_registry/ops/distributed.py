"""Communication between the ranks of a process group.

Every rank of a group must call the same functions in the same order. The decorator ``outside_graphs`` keeps a function
out of compiled graphs. Use this decorator for functions that wait for numbers from other ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
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
    """Stack the tensors ``x`` of all ranks, which have the same shape: [...] -> [ranks, ...]. There is no gradient."""
    ranks = dist.get_world_size(group)
    if not x.numel():
        return x.new_empty(ranks, *x.shape)
    flat = x.detach().reshape(1, -1).contiguous()
    return _functional().all_gather_tensor(flat, 0, _named(group)).view(ranks, *x.shape)


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """Return the sum of the tensors ``x`` of all ranks, in the same shape. There is no gradient."""
    return _functional().all_reduce(x.detach(), "sum", _named(group)) if x.numel() else x


def number_of_ranks(group: Group = None) -> int:
    """Return the number of ranks of a group, or 1 if torch.distributed is not in use."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


@outside_graphs
def mean_of_ranks(x: Tensor, group: Group = None) -> Tensor:
    """Return the mean of the tensors ``x`` of all ranks, in the same shape. There is no gradient."""
    ranks = number_of_ranks(group)
    return x if ranks == 1 else all_reduce(x.detach().clone(), group) / ranks


def gather_rows(x: Tensor, sizes: Sequence[int], group: Group) -> Tensor:
    """Concatenate the tensors ``x`` [B_r, ...] of all ranks r, in rank order: [B_0 + B_1 + ..., ...].

    ``sizes`` lists the numbers of rows B_0, B_1, ... of the ranks. In the backward pass, each rank gets the gradient
    with respect to its own ``x``: the sum of the gradients that all ranks computed for these rows.
    """
    most = max(sizes)
    if not most or 0 in x.shape[1:]:
        return x.new_empty(sum(sizes), *x.shape[1:])
    padded = F.pad(x.flatten(1) if x.ndim > 1 else x[:, None], (0, 0, 0, most - len(x))).contiguous()
    gather = _functional().all_gather_tensor_autograd if x.requires_grad else _functional().all_gather_tensor
    parts = gather(padded, 0, _named(group)).view(len(sizes), most, *x.shape[1:])
    return parts.flatten(0, 1) if min(sizes) == most else torch.cat([p[:n] for p, n in zip(parts, sizes, strict=True)])


class OwnRows(torch.autograd.Function):
    """Select the rows of this rank from a tensor ``x`` with the rows of all ranks, in rank order.

    ``sizes`` lists the number of rows of each rank. In the backward pass, the gradient with respect to ``x`` is the
    concatenation of the gradients that the ranks computed for their own rows.
    """

    @staticmethod
    def forward(ctx, x: Tensor, sizes: Sequence[int], group: Group) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.sizes, ctx.group = sizes, group
        return x.split(list(sizes))[dist.get_rank(group)].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, g: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return gather_rows(g, ctx.sizes, ctx.group), None, None


def agreed(
    check: Callable[[], Mapping[str, float]], group: Group, *, may_differ: Sequence[str] = ()
) -> dict[str, list[float]]:
    """Call ``check`` on every rank. If ``check`` fails on a rank, or if ranks disagree on a number, raise on all ranks.

    Args:
        check: function without arguments. It checks values on this rank, and raises a TypeError or ValueError, or
            returns a dictionary from names of the values to numbers.
        may_differ: names whose numbers may differ between ranks.

    Returns:
        A dictionary from each name to the list of the numbers of all ranks.
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
