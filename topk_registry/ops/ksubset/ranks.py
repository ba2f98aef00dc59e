"""Classes on the ranks of a process group: assignment to ranks, and exchange of states.

Each of R ranks has ceil(n / R) of the n classes. The last ranks have fewer classes, or none.
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
    """Return the number of classes per rank.

    Example:
        >>> classes_per_rank(9, 4)
        [3, 3, 3, 0]
    """
    most = -(-n // ranks)
    return [max(0, min(most, n - most * rank)) for rank in range(ranks)]


def first_class(sizes: Sequence[float], n: int | None, group: Any) -> tuple[int, int]:
    """Return the first class of this rank, and the number of all classes, from the number of classes per rank.

    Raises:
        ValueError: the classes per rank differ from ``classes_per_rank``.
    """
    counts = [int(size) for size in sizes]
    n = sum(counts) if n is None else n
    expected = classes_per_rank(n, len(counts))
    if counts != expected:
        raise ValueError(f"{n} classes on {len(counts)} ranks must be divided as {expected}, got {counts}")
    return sum(counts[: dist.get_rank(group)]), n


def exchange(state: State | None, score: Tensor | None, k: int, x: Tensor, p: "Problem") -> tuple[State, Tensor]:
    """Return the state of the classes of all ranks, and the largest score [B], bitwise equal on all ranks.

    Args:
        state: state of this rank's classes for a top group of k, or None if this rank has no classes.
        score: scores to compare [B]. None: the largest score of the state.
        x: features [B, d].
        p: the process group, and the dtype of scores.
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
    # one message: class indices are exact in double precision
    message = torch.cat([part.double() for part in (top, classes, state.P, score[:, None])], 1)
    states, scores = [], []
    for part in all_gather(message, p.group).unbind(0):
        top, classes, P, own = part.split([T, T, k, 1], 1)
        states.append(State(top.to(state.top), classes.long(), P))
        scores.append(own[:, 0].to(score))
    return graph.merge(states, p.theta), torch.stack(scores).amax(0)
