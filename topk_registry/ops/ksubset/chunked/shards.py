"""The operator over classes that lie on the ranks of a process group: the margins of labels.

Every rank summarises its own classes. The states are gathered, 88 bytes a row and rank at k = 5 in single precision.
Every rank merges them in the order of ranks, so that all hold the same bits. Classes are not sent: a rank finds its own
among the top group by their place. The gradient to a rank's scores needs nothing more from the others.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from topk_registry.ops.ksubset.chunked.custom_ops import Gradients, as_rows, kernels, label_state, score_chunks
from topk_registry.ops.ksubset.chunked.state import State, finish, merge_all
from topk_registry.ops.ksubset.torch.rows import top_group_size
from topk_registry.ops.process_group import Group, all_gather


class Problem(NamedTuple):
    """What all ranks know: the options of the operator, and where the classes lie."""

    group: Group | None  # None where one process has all classes
    n: int  # classes of all ranks
    k: int  # with 2k <= n, as in backends
    theta: float
    sign: int  # of the scores
    like: Tensor  # [0, n] of the dtype to work in
    chunk: int
    dtype: torch.dtype  # of products of matrices


def problem(
    like: Tensor, n: int, k: int, temperature: float, group: Group | None, chunk: int, dtype: torch.dtype
) -> Problem:
    like, inner_k, theta, sign = as_rows(like, n, k, temperature)
    return Problem(group, n, inner_k, theta, sign, like, chunk, dtype)


def chunks_of(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, p: Problem
) -> Iterator[tuple[int, Any, Tensor, Tensor]]:
    """The chunks of ``score_chunks`` of a layer, or where there is no weight of scores x [B, m], which are copied."""
    if weight is not None:
        yield from score_chunks(x.to(p.dtype), weight, bias, p.chunk, p.like, p.sign)
    elif x.shape[1]:
        flat = p.like.new_empty(x.numel() + 1)
        s = flat[:-1].view(x.shape).copy_(x)
        yield 0, None, flat, s.neg_() if p.sign < 0 else s


def own_state(x: Tensor, weight: Tensor | None, bias: Tensor | None, k: int, p: Problem) -> State | None:
    """The state of the classes of this rank, for a top group of k; None where it has none."""
    states = [
        kernels(p.like, k).summarise(s, k, p.theta, first, out=s)
        for first, _, _, s in chunks_of(x, weight, bias, p)
    ]  # fmt: skip
    return merge_all(states, p.theta) if states else None


def exchange(state: State | None, numbers: Tensor, k: int, p: Problem, first: int = -1) -> tuple[State, Tensor]:
    """Merge the states of all ranks for a top group of k, and gather ``numbers`` [B, ...]: [ranks, B, ...].

    Args:
        state: of this rank's classes, counted from its first; None where it has none.
        numbers: of the dtype of the scores.
        first: this rank's first class, to be told the classes of all ranks. Without it classes of other ranks are -1.
    """
    B, T = len(numbers), min(top_group_size(k), p.n)
    top, classes = p.like.new_full((B, T), -torch.inf), numbers.new_full((B, T), -1, dtype=torch.int64)
    P = torch.zeros(B, k, dtype=torch.float64, device=numbers.device)
    if state is not None:
        held = state.top.shape[1]
        top[:, :held], P[:] = state.top, state.P.T
        classes[:, :held] = torch.where(state.top == -torch.inf, -1, state.classes)
    if p.group is None:
        return State(top, classes, P.T), numbers[None]
    sent = [top, P, numbers.reshape(B, -1)]
    if first >= 0:
        sent.append(torch.where(classes < 0, -1, classes + first))
    widths = [part[:1].numel() * part.element_size() if B else 0 for part in sent]
    gathered = all_gather(torch.cat([_bytes(part) for part in sent], 1), p.group, "merging states of classes")
    own, states, everyones = dist.get_rank(p.group), [], []
    for rank, received in enumerate(gathered.unbind(0)):
        parts = [
            part.contiguous().view(one.dtype).view(B, *one.shape[1:])
            for part, one in zip(received.split(widths, 1) if B else sent, sent, strict=True)
        ]
        whose = parts[3] if first >= 0 else classes if rank == own else torch.full_like(classes, -1)
        states.append(State(parts[0], whose, parts[1].T))
        everyones.append(parts[2].view(numbers.shape))
    return merge_all(states, p.theta), torch.stack(everyones)


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8) if x.numel() else x.new_empty(x.shape, dtype=torch.uint8)


class LabelMargins(torch.autograd.Function):
    """The margins [B] of labels, from features and this rank's rows of a layer, or from this rank's scores [B, m].

    ``label`` [B] counts from the rank's first class; one that lies on another rank is negative. The second output is
    the merged top group.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor | None, bias: Tensor | None, label: Tensor, p: Problem):
        with torch.autocast(x.device.type, enabled=False):
            state, score = label_state(chunks_of(x, weight, bias, p), label, p.k, p.theta, p.like)
        score = torch.where(label >= 0, score, -torch.inf)
        state, scores = exchange(state, score, p.k, p)
        f, ctx.problem = finish(state, p.theta), p
        ctx.save_for_backward(*state, x, weight, bias, label)
        margin = p.sign * (scores.amax(0).double() - f.a.double() + f.shift)
        ctx.mark_non_differentiable(state.top)
        return margin, state.top

    @staticmethod
    @once_differentiable
    def backward(ctx, g: Tensor, _):
        top, classes, P, x, weight, bias, label = ctx.saved_tensors
        p, wanted = ctx.problem, list(ctx.needs_input_grad[:3])
        if not any(wanted):
            return (None,) * 5
        f, g, found = finish(State(top, classes, P), p.theta), g.to(p.like)[:, None], None
        if weight is not None:
            found = Gradients(x, weight, bias, p.like, wanted)
        with torch.autocast(x.device.type, enabled=False):
            for first, W, flat, s in chunks_of(x, weight, bias, p):
                # the margin of -s is minus that of s: its gradient to the scores is the same
                ds = kernels(p.like, p.k).gradient(s, label, f, p.theta, first, flat).mul_(g)
                if found is None:
                    return ds.to(x.dtype), None, None, None, None
                found.add(first, ds.to(p.dtype), x.to(p.dtype), W)
        return *(found.all() if found else (torch.zeros_like(x), None, None)), None, None
