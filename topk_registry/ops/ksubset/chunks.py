"""Summaries of the scores of some classes, their merge, and their exchange between the ranks of a process group.

With a process group, the n classes are divided among R ranks in blocks of ceil(n / R) consecutive classes. The last
ranks can have fewer classes, or none. All functions need 2k <= n and record no gradients.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from topk_registry.ops.distributed import all_gather
from topk_registry.ops.ksubset import graph


class State(NamedTuple):
    """Summary of the scores of some classes, in O(k) numbers per row. Margins can be computed from the summary.

    The state holds the 2k + 1 largest scores and, for the other classes, sums of powers of the odds. At temperature
    theta, a class with score s has the odds exp((s - a) / theta), where a is the k-th largest score of the classes in
    the state. :func:`merge` combines the states of different classes.
    """

    top: Tensor  # [B, T], the 2k + 1 largest scores in descending order, or all scores if there are fewer
    classes: Tensor  # [B, T], the classes of these scores
    P: Tensor  # [B, k], power sums of the odds of the other classes


class Coefficients(NamedTuple):
    """Numbers that are computed from a :class:`State`, the summary of the scores of some classes.

    These numbers give the margin, and the gradient of the margin, of any class that is not in the state. A class of the
    state has the odds w = scale exp((score - a) / theta), where a is the k-th largest score and theta is the
    temperature. c_j is the coefficient of X^j in the product of 1 + w X over these classes, divided by the coefficient
    of X^k. Therefore, c_k is 1. The number ``scale`` is chosen such that c_{k-1} is 1, too.
    """

    a: Tensor  # [B, 1], the k-th largest score
    shift: Tensor  # [B, 1], double precision: a class outside of the state with score s has the margin (s - a) + shift
    scale: Tensor  # [B, 1], the odds in c are exp((s - a) / theta) times this number
    c: Tensor  # [k + 1, B, 1], the coefficients c_0, ..., c_k
    classes: Tensor  # [B, T], classes of the top group
    in_top: Tensor  # [B, T], gradient of the margin of such a class with respect to the scores of the top group


@torch.no_grad()
def summarize(s: Tensor, k: int, theta: float, first_class: int = 0) -> State:
    """Summarize the scores s [B, m]: the 2k + 1 largest scores, and sums of powers of the odds of the other classes.

    ``first_class`` is the index of the first of the m classes. At temperature theta, the odds of a class with score s
    are exp((s - a) / theta), where a is the k-th largest score. A class with the score -inf is excluded.
    """
    top, classes = s.topk(min(2 * k + 1, s.shape[1]), dim=-1)
    e = ((s - _reference(top, k)) / theta).scatter(1, classes, -torch.inf).exp()
    return State(top, classes + first_class, graph.power_sums(e, k))


@torch.no_grad()
def merge(states: Sequence[State], theta: float) -> State:
    """Combine the states of disjoint chunks of classes, and return the state of all these classes.

    A state summarizes the scores of a chunk. The power sums of the result are in double precision. Ranks that merge the
    same states in the same order get bitwise equal results.
    """
    k = states[0].P.shape[1]
    top, order = torch.cat([state.top for state in states], 1).sort(dim=1, descending=True, stable=True)
    T = min(top.shape[1], 2 * k + 1)
    a = _reference(top, k).double()
    P = graph.power_sums(((top[:, T:].double() - a) / theta).exp(), k)
    for state in states:
        P = P + graph.tilted(state.P.double(), (_reference(state.top, k).double() - a) / theta)
    classes = torch.cat([state.classes for state in states], 1).gather(1, order[:, :T])
    return State(top[:, :T], classes, P)


def _reference(top: Tensor, k: int) -> Tensor:
    # the k-th largest score [B, 1], or the lowest finite number if fewer than k scores are above -inf
    low = torch.finfo(top.dtype).min
    return top[:, k - 1 : k].clamp_min(low) if top.shape[1] >= k else top.new_full((len(top), 1), low)


@torch.no_grad()
def finish(state: State, theta: float) -> Coefficients:
    """Compute the numbers from which margins follow, see :class:`Coefficients`, at temperature theta.

    The state summarizes the scores of some classes. At least k of these scores must be above -inf in each row.
    """
    k, a = state.P.shape[1], state.top[:, state.P.shape[1] - 1 : state.P.shape[1]]
    x = (state.top.double() - a.double()) / theta
    t, p, outside, c = graph.top_products(x, state.P.double(), k, k, 3)  # degrees k - 2, k - 1, k
    in_top = p * (outside[0] / c[k - 1] - outside[1] / c[k])
    rho = c[k - 1] / c[k]
    degree = torch.arange(k + 1, dtype=c.dtype, device=c.device)[:, None, None]
    balanced = c / c[k] * (rho.log() * (degree - k)).clamp_max(graph.MAX_GAP).exp()
    balanced = torch.where(balanced < 2.0**-70, 0.0, balanced)  # avoids denormal numbers, which do not affect results
    dtype = a.dtype
    return Coefficients(
        a, theta * (rho.log() - t), (rho * (-t).exp()).to(dtype), balanced.to(dtype), state.classes, in_top.to(dtype)
    )


def scatter_own(out: Tensor, classes: Tensor, values: Tensor, first_class: int) -> Tensor:
    """Return a copy of ``out`` [B, m] with ``values`` [B, T] written to the columns of their ``classes`` [B, T].

    Column j of ``out`` belongs to class first_class + j. Values of classes without a column are ignored.
    """
    m, local = out.shape[1], classes - first_class
    place = torch.where((local >= 0) & (local < m), local, m)
    return F.pad(out, (0, 1)).scatter(1, place, values)[:, :m]


@torch.no_grad()
def label_gradient(s: Tensor, f: Coefficients, theta: float, first_class: int = 0) -> Tensor:
    """Return the gradient of the label's margin with respect to the scores s [B, m] of some classes, by formula (10).

    README.md in this folder has the formula. ``f`` must be computed from all classes except the label. The gradient
    with respect to the label's own score is 1. The caller must write this 1, because the function treats the label as
    any other class.
    """
    k = len(f.c) - 1
    v = ((s - f.a) / theta).clamp_max(0.0).exp() * f.scale  # scatter_own overwrites the entries of the top group
    if k == 1:
        return scatter_own(-v, f.classes, f.in_top, first_class)
    below, _ = graph.divide_out(f.c[:k], v, k - 1)  # d_{k-2}
    return scatter_own(v * (below * (1 + v) - 1), f.classes, f.in_top, first_class)


@torch.no_grad()
def top_margins(state: State, theta: float) -> Tensor:
    """Return the margins of the k classes with the largest scores [B, k] in double precision, largest first.

    The margin of a class is its score minus the k-th largest score of the other classes, smoothed with temperature
    theta. For the k largest classes, this k-th largest score is the (k + 1)-th largest score of all classes. Therefore,
    ``state`` must be a result of ``summarize(s, k + 1, theta)``, or a result of :func:`merge` for such states.
    """
    k = state.P.shape[1] - 1
    top = state.top.double()
    gap = top - top[:, k : k + 1]
    f = graph.top_products(gap / theta, state.P[:, :k].double(), k, k + 1)
    below, last = f.outside
    return graph.margins_from(below, last, gap, f.t, theta)[:, :k]


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


def exchange(
    state: State | None, score: Tensor | None, k: int, x: Tensor, theta: float, group: Any
) -> tuple[State, Tensor]:
    """Return the state of the classes of all ranks, and for each row the maximum of ``score`` over the ranks [B].

    Both results are bitwise equal on all ranks.

    Args:
        state: state of this rank's classes, or None if this rank has no classes.
        score: one score per row [B]. Default: the largest score in ``state``.
        k: as in top-k. A state contains k power sums.
        x: features [B, d], which give the batch size and the device.
        theta: temperature, by which scores are divided.
        group: process group. If None, this is the only rank, and nothing is exchanged.
    """
    B, T = len(x), 2 * k + 1
    if state is None:
        top = x.new_full((B, 1), -torch.inf, dtype=torch.promote_types(x.dtype, torch.float32))
        state = State(top, torch.full_like(top, -1, dtype=torch.int64), top.new_zeros(B, k, dtype=torch.float64))
    score = state.top[:, 0] if score is None else score
    if group is None:
        return state, score
    missing = T - state.top.shape[1]
    top, classes = F.pad(state.top, (0, missing), value=-torch.inf), F.pad(state.classes, (0, missing), value=-1)
    # all numbers fit in one message, because double precision is exact for class indices
    message = torch.cat([part.double() for part in (top, classes, state.P, score[:, None])], 1)
    states, scores = [], []
    for part in all_gather(message, group).unbind(0):
        top, classes, P, of_label = part.split([T, T, k, 1], 1)
        states.append(State(top.to(state.top), classes.long(), P))
        scores.append(of_label[:, 0].to(score))
    return merge(states, theta), torch.stack(scores).amax(0)
