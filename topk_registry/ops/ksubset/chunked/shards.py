"""The operator over classes that lie on the ranks of a process group: the margins of labels.

Every rank summarises its own classes, in 88 bytes a row at k = 5 in single precision. Two ranks gather both states, and
each merges them in the order of ranks. More ranks share the rows: each merges the states of its part, which the others
send it, and what it found is gathered. So all ranks hold the same bits, and the bytes that a rank receives grow with
the rows alone, not with the ranks too. A rank finds its own classes among the top group by their place. The gradient to
a rank's scores needs nothing more from the others.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from topk_registry.ops.ksubset.chunked.layer import (
    BackwardPass,
    Problem,
    chunks_of,
    kernels,
    label_state,
    layer_gradients,
)
from topk_registry.ops.ksubset.torch.rows import finish, top_group_size
from topk_registry.ops.ksubset.torch.state import State, merge_all
from topk_registry.ops.process_group import all_gather, all_to_all

BY_ROWS = 3  # ranks, from which on sharing the rows sends fewer bytes than gathering the states of all


def exchange(
    state: State | None, score: Tensor | None, k: int, p: Problem, rows: int, first: int = -1
) -> tuple[State, Tensor]:
    """Merge the states of all ranks for a top group of k, and return the largest of their scores [B].

    Args:
        state: of this rank's classes, counted from its first; None where it has none.
        score: [B], of the dtype of the scores; None for none.
        rows: B.
        first: this rank's first class, to be told the classes of all ranks. Without it classes of other ranks are -1.
    """
    T = min(top_group_size(k), p.n)
    top, device = p.like.new_full((rows, T), -torch.inf), p.like.device
    classes = torch.full((rows, T), -1, dtype=torch.int64, device=device)
    P = torch.zeros(rows, k, dtype=torch.float64, device=device)
    if state is not None:
        held = state.top.shape[1]
        top[:, :held], P[:] = state.top, state.P.T
        classes[:, :held] = torch.where(state.top == -torch.inf, -1, state.classes)
    own = top[:, 0] if score is None else score
    if p.group is None:
        return State(top, classes, P.T), own
    ranks, rank = dist.get_world_size(p.group), dist.get_rank(p.group)
    parts = [top, P, own[:, None]]
    if first >= 0:
        parts.append(torch.where(classes < 0, -1, classes + first))
    if ranks < BY_ROWS:
        whole = _merged(all_gather(_bytes(parts), p.group, "merging states of classes"), parts, p.theta)
    else:
        share = -(-rows // ranks)
        sent = F.pad(_bytes(parts), (0, 0, 0, share * ranks - rows)).unflatten(0, (ranks, share))
        mine = _merged(all_to_all(sent, p.group, "merging states of classes"), parts, p.theta)
        whole = _parts(all_gather(_bytes(mine), p.group, "gathering states of rows").flatten(0, 1)[:rows], mine)
    top, P, own, names = whole
    if first < 0:
        local = names - T * rank
        here = (local >= 0) & (local < T)
        classes = torch.where(here, classes.gather(1, local.clamp(0, T - 1).long()), -1)
    return State(top, classes if first < 0 else names, P.T), own[:, 0]


def _merged(received: Tensor, parts: list[Tensor], theta: float) -> list[Tensor]:
    """The parts of one state for each row, from the bytes [ranks, B, ...] of the states of all ranks.

    The last part names the classes of the top group: as the ranks do, else by places among the top groups of all.
    """
    states, largest, T = [], [], parts[0].shape[1]
    for rank, one in enumerate(received.unbind(0)):
        top, P, own, *names = _parts(one, parts)
        places = torch.arange(T * rank, T * (rank + 1), dtype=torch.int32, device=top.device).expand(top.shape)
        states.append(State(top, names[0] if names else places, P.T))
        largest.append(own)
    top, names, P = merge_all(states, theta)
    return [top, P.T, torch.stack(largest).amax(0), names]


def _bytes(parts: list[Tensor]) -> Tensor:
    """Tensors [B, c] of any dtypes as one of bytes, a row for each of theirs."""
    sizes = [(len(part), part.shape[1] * part.element_size()) for part in parts]
    # flat first: a dimension of size 1 may have any stride, and a tensor of bytes may not
    return torch.cat(
        [part.contiguous().flatten().view(torch.uint8).view(size) for part, size in zip(parts, sizes, strict=True)], 1
    )


def _parts(rows: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Tensors like those given, from bytes [B, ...] that :func:`_bytes` made."""
    widths = [part.shape[1] * part.element_size() for part in like]
    # a copy, also of a single row: its bytes must begin where a number of that type may
    copies = (part.clone(memory_format=torch.contiguous_format) for part in rows.split(widths, 1))
    return [part.view(one.dtype) for part, one in zip(copies, like, strict=True)]


def label_margins(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, label: Tensor, p: Problem
) -> tuple[Tensor, State]:
    """The margins [B] of labels, and the merged state of all classes but the label.

    From features and this rank's rows of a layer, or from this rank's scores [B, m] where there is no weight. ``label``
    [B] counts from the rank's first class; one that lies on another rank is negative.
    """
    with torch.autocast(x.device.type, enabled=False):
        state, score = label_state(chunks_of(x, weight, bias, p), label, p.k, p.theta, p.like)
    if p.group is not None:
        score = torch.where(label >= 0, score, -torch.inf)
    state, score = exchange(state, score, p.k, p, len(x))
    f = finish(state, p.theta)
    return p.sign * (score.double() - f.a.double() + f.shift), state


def label_gradients(
    g: Tensor,
    state: State,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    label: Tensor,
    p: Problem,
    wanted: list[bool],
) -> list[Tensor | None]:
    """The gradients of :func:`label_margins` to x, weight and bias, None where none is wanted."""
    f, g = finish(state, p.theta), g.to(p.like)

    def chunks(size: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        for first, W, flat, s in chunks_of(x, weight, bias, p._replace(chunk=size)):
            # the margin of -s is minus that of s: its gradient to the scores is the same
            ds = kernels(p.like, p.k).gradient(s, label, f, p.theta, g, first, flat)
            yield first, W, ds.to(p.dtype)

    if weight is not None:
        return layer_gradients(BackwardPass(x, chunks, p), weight, bias, wanted)
    with torch.autocast(x.device.type, enabled=False):
        return [next((ds.to(x.dtype) for _, _, ds in chunks(p.chunk)), torch.zeros_like(x)), None, None]


class LabelMargins(torch.autograd.Function):
    """:func:`label_margins`, on any ranks; the second output is the merged top group."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor | None, bias: Tensor | None, label: Tensor, p: Problem):
        margin, state = label_margins(x, weight, bias, label, p)
        ctx.problem = p
        ctx.save_for_backward(*state, x, weight, bias, label)
        ctx.mark_non_differentiable(state.top)
        return margin, state.top

    @staticmethod
    @once_differentiable
    def backward(ctx, g: Tensor, _):
        if ctx.problem.update is not None:
            ctx.problem.update.enter()
        top, classes, P, x, weight, bias, label = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:3])
        if not any(wanted):
            return (None,) * 5
        state = State(top, classes, P)
        return *label_gradients(g, state, x, weight, bias, label, ctx.problem, wanted), None, None
