"""The operator over classes that come in chunks, or lie on several machines.

Each chunk is summarised by itself (summarise in rows.py), states are merged in any order, and what is made of the whole
(finish there) gives the margins and, chunk by chunk again, the gradient:

    state = merge(summarise(s[:, :m], k, theta), summarise(s[:, m:], k, theta, first_class=m), theta)

Odds in a state are relative to its own k-th largest score. Merging can only raise that, so odds are only ever scaled
down: nothing overflows, and what summarise adds to small odds, to keep denormal numbers out, shrinks with them. Merged
power sums are in double precision, so that hundreds of chunks lose no digits.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from topk_registry.ops.ksubset.torch.rows import (
    WITH_TAIL,
    Coefficients,
    State,
    polynomials,
    power_sums,
    reference,
    row_blocks,
    summarise,
    tail_gradient,
    tail_odds,
    tilt,
    tilted,
    top_group_size,
)


def merge(one: State, other: State, theta: float) -> State:
    """The state of the classes of both: a top group of both top groups; who falls out of it joins the tail."""
    return merge_all((one, other), theta)


def merge_all(states: Sequence[State], theta: float) -> State:
    """The state of the classes of all, see :func:`merge`; the same bits wherever it is given the same order."""
    k = len(states[0].P)
    top, order = torch.cat([state.top for state in states], 1).sort(1, descending=True)
    T = min(top.shape[1], top_group_size(k))
    a = reference(top, k).double()
    fallen = torch.exp((top[:, T:].double() - a[:, None]) / theta)
    P = power_sums(fallen, k) if k <= WITH_TAIL else fallen.new_zeros(k, len(fallen))
    for state in states:
        P = P + tilted(state.P.double(), (reference(state.top, k).double() - a) / theta)
    classes = torch.cat([state.classes for state in states], 1).gather(1, order[:, :T])
    return State(top[:, :T], classes, P)


def extend(
    state: State | None, score: Tensor | None, s: Tensor, label: Tensor, k: int, theta: float, first_class: int,
    flat: Tensor, *, summarise: Callable[..., State] = summarise,
) -> tuple[State, Tensor]:  # fmt: skip
    """The state of the classes of ``state`` and of a chunk but the label [B], and the label's score [B].

    None stands for no classes before. The score is NaN where the label is none of the classes. ``flat`` is the memory
    of s, see :func:`put`; its numbers are used up.
    """
    local = label - first_class
    mine = (local >= 0) & (local < s.shape[1])
    nothing = s.new_full((len(label), 1), -torch.inf)
    score = torch.full_like(nothing[:, 0], torch.nan) if score is None else score
    score = torch.where(mine, s.gather(1, local.clamp(0, s.shape[1] - 1)[:, None])[:, 0], score)
    put(flat, label[:, None], nothing, first_class)
    part = summarise(s, k, theta, first_class, out=s)
    return part if state is None else merge(state, part, theta), score


def gradient(
    s: Tensor, label: Tensor, f: Coefficients, theta: float, g: Tensor, first_class: int = 0, flat: Tensor | None = None
) -> Tensor:
    """g [B] times the gradient of the label's margin to the scores of a chunk [B, m], labels [B] among all classes.

    It is written into ``flat`` [B m + 1], which may hold s in its first B m numbers; see :func:`put`.
    """
    flat = s.new_empty(s.numel() + 1) if flat is None else flat
    w = flat[:-1].view(s.shape)
    for rows in row_blocks(s):
        tail_odds(s[rows], f.a[rows], None, theta, out=w[rows])
    tail_gradient(w, f)
    put(flat, f.classes, f.in_top, first_class)
    put(flat, label[:, None], torch.ones_like(f.in_top[:, :1]), first_class)
    return w.mul_(g[:, None])


def put(flat: Tensor, classes: Tensor, values: Tensor, first_class: int) -> None:
    """Write values [B, m] at their classes into a chunk that starts with first_class.

    ``flat`` holds the chunk's numbers, a row after the other, and one more, which takes what belongs to other chunks:
    so a device need not be asked which those are.
    """
    B = len(classes)
    n = (len(flat) - 1) // max(B, 1)
    local = classes - first_class
    row = torch.arange(B, device=flat.device)[:, None]
    place = torch.where((local >= 0) & (local < n), local + n * row, n * B)
    flat.scatter_(0, place.flatten(), values.flatten())


def top_margins(state: State, theta: float) -> Tensor:
    """Margins [B, k] of the k largest classes, from a state made for k + 1.

    Leaving out one of them moves the balance to the class after them: the tilt is that for k + 1.
    """
    k, P, next_one = len(state.P) - 1, state.P.double(), state.top[:, len(state.P) - 1, None].double()
    gap = state.top.double() - next_one
    x = gap.T / theta
    t = tilt(x, P[0], k + 1)
    _, e = polynomials(x - t, tilted(P[:k], -t) if k < WITH_TAIL else None, k, depth=1)
    return gap[:, :k] + theta * ((e[:k, 0] / e[:k, 1]).log() - t).T
