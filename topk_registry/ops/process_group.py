"""Collectives of a process group with gradients and with errors that every rank sees.

Every rank of the group calls the same functions in the same order. An error on one rank becomes an error on all of
them before any of them changes anything, and a rank that is gone ends the others with a message that says so.

A step waits for the numbers that ranks compare, so it is no part of a compiled graph: ``outside_graphs`` ends the graph
before it, and the rest of a model is compiled around it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

Group = Any  # torch.distributed.ProcessGroup, which does not exist where torch is built without it
outside_graphs = _disable_dynamo  # torch.compiler.disable, which would import the compiler at once


@contextmanager
def answering(group: Group, what: str) -> Iterator[None]:
    """Name the step and the group where a collective fails because another rank does not take part."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {dist.get_rank(group)} of {dist.get_world_size(group)} got no answer while {what}: another rank of "
            "the process group ended, or was silent for longer than the timeout of the group"
        ) from error


def _function(*names: str) -> Callable[..., Any]:
    """The first of these functions of torch.distributed that is there: some were renamed, and the older names warn."""
    return next(getattr(dist, name) for name in names if hasattr(dist, name))


def all_gather(x: Tensor, group: Group, what: str) -> Tensor:
    """Stack a tensor of every rank, which has one shape on all of them: [...] -> [ranks, ...]."""
    out = x.new_empty(dist.get_world_size(group), *x.shape)
    if x.numel():
        with answering(group, what):
            gather = _function("all_gather_single", "all_gather_into_tensor")
            gather(out.flatten(0, 1) if x.ndim else out, x.contiguous(), group=group)
    return out


def all_to_all(x: Tensor, group: Group, what: str) -> Tensor:
    """Send the r-th of as many parts as there are ranks to rank r: [ranks, ...] -> what each rank sent to this one."""
    received, x = torch.empty_like(x, memory_format=torch.contiguous_format), x.contiguous()
    if x.numel():
        with answering(group, what):
            dist.all_to_all_single(received, x, group=group)
    return received


def all_reduce(x: Tensor, group: Group, what: str) -> Tensor:
    """Sum a tensor over the ranks, in its own memory."""
    if x.numel():
        with answering(group, what):
            dist.all_reduce(x, group=group)
    return x


def agreed(
    facts: Callable[[], dict[str, float]],
    names: Sequence[str],
    group: Group,
    device: torch.device,
    *,
    may_differ: Sequence[str] = (),
) -> dict[str, list[float]]:
    """Exchange what each rank was given, and raise on all ranks where one has an error or where two disagree.

    Args:
        facts: checks this rank's arguments and returns one number for each of ``names``; may raise a ValueError.
        may_differ: names of facts that may differ between ranks.

    Returns:
        The numbers of all ranks, by name.
    """
    numbers, wrong = [1.0] + [0.0] * len(names), None
    try:
        own = facts()
        numbers = [0.0, *(float(own.get(name, 0.0)) for name in names)]
    except (TypeError, ValueError) as error:
        wrong = error
    dtype = torch.float32 if device.type == "mps" else torch.float64
    rows = all_gather(torch.tensor(numbers, dtype=dtype, device=device), group, "comparing arguments").tolist()
    failed = [rank for rank, row in enumerate(rows) if row[0]]
    if failed:
        messages: list[Any] = [None] * len(rows)
        with answering(group, "collecting errors"):
            dist.all_gather_object(messages, str(wrong) if wrong else None, group=group)
        if wrong is not None:
            raise wrong
        raise ValueError(f"rank {failed[0]} of the process group: {messages[failed[0]]}")
    of_ranks = {name: [row[1 + place] for row in rows] for place, name in enumerate(names)}
    for name, values in of_ranks.items():
        if name not in may_differ and len(set(values)) > 1:
            raise ValueError(f"ranks of the process group disagree on {name}: {[_plain(value) for value in values]}")
    return of_ranks


def _plain(value: float) -> float | int:
    return int(value) if value == int(value) else value


def gather_rows(x: Tensor, sizes: Sequence[int], group: Group) -> Tensor:
    """Gather rows of every rank in the order of ranks, without a gradient: [B_r, ...] -> [sum of sizes, ...]."""
    most = max(sizes)
    padded = x if len(x) == most else torch.cat((x, x.new_zeros(most - len(x), *x.shape[1:])))
    parts = all_gather(padded, group, "gathering rows")
    if min(sizes) == most:
        return parts.flatten(0, 1)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def gather_to_first(x: Tensor, sizes: Sequence[int], group: Group) -> Tensor | None:
    """The rows of every rank [sum of sizes, ...] in the first rank's main memory, None elsewhere.

    They come one rank after the other, so that the first rank's device holds the rows of one other rank at a time.
    """
    rank, x = dist.get_rank(group), x.detach()
    with answering(group, "gathering rows for a checkpoint"):
        if rank:
            if len(x):
                dist.send(x.contiguous(), group=group, group_dst=0)
            return None
        whole = torch.empty(sum(sizes), *x.shape[1:], dtype=x.dtype)
        parts = whole.split(list(sizes))
        parts[0].copy_(x)
        for other, part in enumerate(parts[1:], 1):
            if len(part):
                received = x.new_empty(part.shape)
                dist.recv(received, group=group, group_src=other)
                part.copy_(received)
    return whole


def columns_of_all_rows(x: Tensor, sizes: Sequence[int], columns: int, group: Group) -> Tensor:
    """Exchange whole rows for a part of all rows: [B_r, n] -> [sum of sizes, columns], rank r getting the r-th part."""
    ranks, most = len(sizes), max(sizes)
    sent = x.new_zeros(most, ranks * columns)
    sent[: len(x), : x.shape[1]] = x
    received = all_to_all(sent.unflatten(1, (ranks, columns)).transpose(0, 1), group, "exchanging targets")
    return torch.cat([part[:size] for part, size in zip(received, sizes, strict=True)])


class GatherRows(torch.autograd.Function):
    """:func:`gather_rows`, whose gradient is summed over the ranks and goes to the rank that the row came from.

    ``factor`` multiplies that gradient.
    """

    @staticmethod
    def forward(ctx, x: Tensor, sizes: Sequence[int], group: Group, factor: float) -> Tensor:
        ctx.sizes, ctx.group, ctx.factor = sizes, group, factor
        return gather_rows(x, sizes, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, g: Tensor):
        sizes, rank, most = ctx.sizes, dist.get_rank(ctx.group), max(ctx.sizes)
        if min(sizes) < most:
            parts = [torch.cat((part, g.new_zeros(most - len(part), *g.shape[1:]))) for part in g.split(list(sizes))]
            g = torch.cat(parts)
        own = g.new_empty(most, *g.shape[1:])
        if g.numel():
            with answering(ctx.group, "returning the gradient of features"):
                scatter = _function("reduce_scatter_single", "reduce_scatter_tensor")
                scatter(own, g.contiguous(), group=ctx.group)
        own = own[: sizes[rank]]
        return own if ctx.factor == 1 else own * ctx.factor, None, None, None


class SameOnAllRanks(torch.autograd.Function):
    """The identity for a tensor that every rank holds; its gradient is summed over the ranks, times ``factor``."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Group, factor: float) -> Tensor:
        ctx.group, ctx.factor = group, factor
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, g: Tensor):
        total = all_reduce(g.clone(memory_format=torch.contiguous_format), ctx.group, "summing gradients")
        return total if ctx.factor == 1 else total * ctx.factor, None, None


class OwnRows(torch.autograd.Function):
    """The rows of this rank, of rows that every rank holds; its gradient is gathered, so that every rank has all."""

    @staticmethod
    def forward(ctx, x: Tensor, sizes: Sequence[int], group: Group) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        return x.split(list(sizes))[dist.get_rank(group)].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, g: Tensor):
        return gather_rows(g, ctx.sizes, ctx.group), None, None
