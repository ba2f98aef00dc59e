"""Assignment of classes to the ranks of a process group, and exchange of the ranks' summaries of scores.

The n classes are divided among R ranks in blocks of ceil(n / R) consecutive classes. The last ranks can have fewer
classes, or none.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from topk_registry.ops.distributed import all_gather
from topk_registry.ops.ksubset import graph
from topk_registry.ops.ksubset.graph import State

if TYPE_CHECKING:
    from topk_registry.ops.ksubset.linear import Problem


def classes_per_rank(n: int, ranks: int) -> list[int]:
    """Return the number of classes of each rank, for n classes.

    Example:
        >>> classes_per_rank(9, 4)
        [3, 3, 3, 0]
    """
    most = -(-n // ranks)
    return [max(0, min(most, n - most * rank)) for rank in range(ranks)]


def first_class(sizes: Sequence[float], group: Any) -> tuple[int, int]:
    """Return the index of the first class of this rank, and the number of classes of all ranks.

    Args:
        sizes: number of classes of each rank.
        group: process group.

    Raises:
        ValueError: ``sizes`` differs from ``classes_per_rank(sum(sizes), len(sizes))``.
    """
    counts = [int(size) for size in sizes]
    n = sum(counts)
    expected = classes_per_rank(n, len(counts))
    if counts != expected:
        raise ValueError(f"{n} classes on {len(counts)} ranks must be divided as {expected}, got {counts}")
    return sum(counts[: dist.get_rank(group)]), n


def exchange(state: State | None, score: Tensor | None, k: int, x: Tensor, p: "Problem") -> tuple[State, Tensor]:
    """Return the state of the classes of all ranks, and for each row the maximum of ``score`` over the ranks [B].

    A :class:`graph.State` summarizes the scores of some classes. Both results are bitwise equal on all ranks.

    Args:
        state: state of this rank's classes, or None if this rank has no classes.
        score: one score per row [B]. Default: the largest score in ``state``.
        k: as in top-k. A state contains k power sums.
        x: features [B, d], which give the batch size and the device.
        p: settings of the computation. If ``p.group`` is None, this is the only rank, and nothing is exchanged.
    """
    B, T = len(x), 2 * k + 1
    if state is None:
        top = x.new_full((B, 1), -torch.inf, dtype=p.wide)
        state = State(top, torch.full_like(top, -1, dtype=torch.int64), top.new_zeros(B, k, dtype=torch.float64))
    score = state.top[:, 0] if score is None else score
    if p.group is None:
        return state, score
    missing = T - state.top.shape[1]
    top, classes = F.pad(state.top, (0, missing), value=-torch.inf), F.pad(state.classes, (0, missing), value=-1)
    # all numbers fit in one message, because double precision is exact for class indices
    message = torch.cat([part.double() for part in (top, classes, state.P, score[:, None])], 1)
    states, scores = [], []
    for part in all_gather(message, p.group).unbind(0):
        top, classes, P, of_label = part.split([T, T, k, 1], 1)
        states.append(State(top.to(state.top), classes.long(), P))
        scores.append(of_label[:, 0].to(score))
    return graph.merge(states, p.theta), torch.stack(scores).amax(0)
