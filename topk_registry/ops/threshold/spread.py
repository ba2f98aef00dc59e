"""The loss with classes in chunks, on one process or several: a few numbers a row for each step, never all scores.

Each step of equation 7 makes the scores of every chunk anew and keeps ten numbers a row, which the ranks gather. They
are merged in one order, so that all ranks take the same steps, to the bit. The backward pass makes the scores again.

The scores of a few labels a row are kept from the first pass. A target with mass on all classes takes a pass more.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from topk_registry.ops.process_group import Group, all_gather
from topk_registry.ops.targets.table import wide

MOST_STEPS = 200  # 3 to 6 in practice, 40 where hundreds of scores lie far apart
PATIENCE = 6  # steps after which every third one leaps


class Classes(NamedTuple):
    """Scores of this rank's classes: made by a layer a chunk at a time, or given where there is no weight."""

    x: Tensor  # features [B, d], or scores [B, m]
    weight: Tensor | None
    bias: Tensor | None
    chunk: int
    dtype: torch.dtype  # of products of matrices

    def __iter__(self) -> Iterator[tuple[int, Tensor | None, Tensor]]:
        """Each chunk's first class, its rows of the weight, and its scores [B, chunk] in at least single precision."""
        if self.weight is None:
            yield 0, None, wide(self.x)
            return
        for first in range(0, len(self.weight), self.chunk):
            W = self.weight[first : first + self.chunk].to(self.dtype)
            bias = None if self.bias is None else self.bias[first : first + self.chunk].to(self.dtype)
            yield first, W, wide(F.linear(self.x.to(self.dtype), W, bias))


class Goal(NamedTuple):
    """The masses of a target on this rank's classes, times the classes' weights."""

    labels: Tensor  # [B, m], counted from this rank's first class, -1 for those of other ranks
    shares: Tensor  # [B, m], of these labels on whatever rank, with their weights
    others: Tensor | None = None  # further masses of all classes of this rank, [B, size]; None for none
    factor: Tensor | None = None  # [size], the weights of the classes in ``others``

    def of_chunk(self, first: int, s: Tensor) -> Tensor:
        """The further masses of the classes of a chunk, like its scores [B, chunk]."""
        assert self.others is not None, "asked for only where there are some"
        here = slice(first, first + s.shape[1])
        q = self.others[:, here].to(s)
        return q if self.factor is None else q * self.factor[here].to(s)

    def places(self, first: int, size: int) -> tuple[Tensor, Tensor]:
        """Which labels are in a chunk, and their places in it, 0 for others; each [B, m]."""
        place = self.labels - first
        here = (self.labels >= 0) & (place >= 0) & (place < size)
        return here, torch.where(here, place, 0)


class Sums(NamedTuple):
    """Both sides of equation 3, below b and above, each [2, B], relative to the nearest score of the side."""

    near: Tensor  # its distance
    total: Tensor  # of p, above of 1 - p
    slope: Tensor  # of v
    bend: Tensor  # of the derivative of v to b
    count: Tensor


def sums_of(u: Tensor) -> Sums:
    """The sums over scores u = x - b [B, m]."""
    above = u > 0
    sides = []
    for inside, sign in ((~above, -1.0), (above, 1.0)):
        distance = torch.where(inside, u.abs(), torch.inf)
        near = distance.amin(1)
        near = torch.where(near < torch.inf, near, 0.0)
        small = (-distance).exp()
        p = (near[:, None] - distance).exp() / (1 + small)
        v = p / (1 + small)
        bend = sign * v * (1 - small) / (1 + small)
        sides.append((near, p.sum(1), v.sum(1), bend.sum(1), inside.sum(1).to(u.dtype)))
    near, total, slope, bend, count = (torch.stack(pair) for pair in zip(*sides, strict=True))
    return Sums(near, total, slope, bend, count)


def merged(parts: Sequence[Sums]) -> Sums:
    """The sums over all classes from those over parts of them."""
    near, total, slope, bend, count = (torch.stack(each) for each in zip(*parts, strict=True))
    least = torch.where(total > 0, near, torch.inf).amin(0)
    least = torch.where(least < torch.inf, least, 0.0)
    factor = torch.where(total > 0, (least - near).exp(), 0.0)
    return Sums(least, (factor * total).sum(0), (factor * slope).sum(0), (factor * bend).sum(0), count.sum(0))


def step_of(sums: Sums, k: float) -> Tensor:
    """A step of Newton's method for equation 7, [B]."""
    more = sums.count[1] - k
    more = torch.stack((more, -more))
    small = (-sums.near).exp()
    alone = more <= 0
    whole = torch.where(alone, sums.total, more + small * sums.total)
    logs = whole.log() - torch.where(alone, sums.near, 0.0)
    slopes = torch.where(alone, sums.slope, small * sums.slope) / whole
    return (logs[0] - logs[1]) / slopes.sum(0)


class TargetLosses(torch.autograd.Function):
    """sum_c q_c w_c (-log p_c) of each row [B], the same on all ranks.

    The gradient of features is this rank's part: the sum over the ranks is the whole.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, goal: Goal, k: float, tau: float,
        chunk: int, dtype: torch.dtype, group: Group | None,
    ) -> Tensor:  # fmt: skip
        classes = Classes(x, weight, bias, chunk, dtype)
        log_total, possible, x_y = _first_pass(classes, goal, tau, group)
        eps = torch.finfo(log_total.dtype).eps
        solvable = (possible > k) & (log_total < torch.inf)
        b = torch.where(solvable, log_total - torch.log(torch.as_tensor(k)).to(log_total), torch.nan)  # equation 4
        low, high = torch.full_like(b, -torch.inf), torch.full_like(b, torch.inf)
        turn, stride = 0, 1
        while True:
            sums = _of_all([sums_of(s / tau - b[:, None]) for _, _, s in classes], b, group)
            step = step_of(sums, k)
            across = torch.where(sums.count[1] == k, sums.near.amax(0), 0.0)
            enough = eps**0.5 / 2 + 4 * eps * (across + b.abs())  # x - b is rounded by as much
            going = step.abs() > enough  # rows of NaN are done
            if turn == MOST_STEPS or not bool(going.any()):
                b = torch.where(going, torch.nan, b)
                break
            turn += 1
            low, high = torch.where(step > 0, b, low), torch.where(step > 0, high, b)
            middle, after = (low + high) / 2, b + step
            outside = (after < low) | (after > high)
            if turn > PATIENCE and turn % 3 == 0:
                stride *= 2
                leap = b + stride * step
                after = torch.where(step > 0, torch.minimum(leap, middle), torch.maximum(leap, middle))
            after = torch.where(outside, middle, after)
            b = torch.where(going, after, b)
        nearest = (sums.near + torch.stack((step, -step))).amin(0)
        slope = ((nearest - sums.near).exp() * (sums.slope + step * sums.bend)).sum(0)  # to second order in the step
        b = b + step
        shares = goal.shares.to(b)
        value, push = _losses_and_slopes(shares, b, x_y)
        if goal.others is not None:
            more = _last_pass(classes, goal, b, tau, group)
            value, push = value + more[0], push + more[1]
        ctx.save_for_backward(x, weight, bias, b, nearest, slope, _slopes(shares, b, x_y), push)
        ctx.options = goal, tau, chunk, dtype
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, b, nearest, slope, pull, push = ctx.saved_tensors
        goal, tau, chunk, dtype = ctx.options
        g = g[:, None] / tau
        push, pull = _product(g, push[:, None]), _product(g, pull)
        of_x: Tensor | None = None
        of_weight = of_bias = None
        if weight is not None:
            of_x = torch.zeros_like(x, dtype=wide(x).dtype)
            of_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
            of_bias = torch.empty_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        for first, W, s in Classes(x, weight, bias, chunk, dtype):
            s = s / tau
            distance = (s - b[:, None]).abs()
            v = (nearest[:, None] - distance).exp() / (1 + (-distance).exp()) ** 2
            ds = torch.where(push != 0, v * (push / slope[:, None]), 0.0)
            here, place = goal.places(first, s.shape[1])
            ds.scatter_add_(1, place, torch.where(here, -pull, 0.0))
            if goal.others is not None:
                ds -= _product(g, _slopes(goal.of_chunk(first, s), b, s))
            if W is None or of_x is None:
                of_x = ds
                break
            ds = ds.to(dtype)
            of_x += ds @ W
            if of_weight is not None:
                of_weight[first : first + len(W)] = ds.T @ x.to(dtype)
            if of_bias is not None:
                of_bias[first : first + len(W)] = ds.sum(0)
        return None if of_x is None else of_x.to(x.dtype), of_weight, of_bias, *(None,) * 6


def _first_pass(classes: Classes, goal: Goal, tau: float, group: Group | None) -> tuple[Tensor, Tensor, Tensor]:
    """log sum e^x [B], how many scores are above -inf [B], and the labels' x [B, m]; of all ranks."""
    like = wide(classes.x.new_empty(0, dtype=classes.dtype))
    log_total, x_y = like.new_full((len(classes.x),), -torch.inf), like.new_full(goal.labels.shape, -torch.inf)
    possible = torch.zeros_like(log_total)
    for first, _, s in classes:
        x = s / tau
        log_total = torch.logaddexp(log_total, x.logsumexp(1))
        possible = possible + (s > -torch.inf).sum(1)
        here, place = goal.places(first, s.shape[1])
        x_y = torch.where(here, x.gather(1, place), x_y)
    if group is None:
        return log_total, possible, x_y
    parts = all_gather(torch.cat((log_total[None], possible[None], x_y.T)), group, "finding the threshold")
    return parts[:, 0].logsumexp(0), parts[:, 1].sum(0), parts[:, 2:].amax(0).T


def _last_pass(classes: Classes, goal: Goal, b: Tensor, tau: float, group: Group | None) -> Tensor:
    """Losses and slopes of the masses on all classes, [2, B]; of all ranks."""
    sums = b.new_zeros(2, len(b))
    for first, _, s in classes:
        sums += torch.stack(_losses_and_slopes(goal.of_chunk(first, s), b, s / tau))
    return sums if group is None else all_gather(sums, group, "adding losses of classes").sum(0)


def _losses_and_slopes(q: Tensor, b: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """sum_c q_c (-log p_c) and sum_c q_c (1 - p_c), each [B], of masses q and scores x [B, m]."""
    losses = _product(q, F.softplus(b[:, None] - x, threshold=40.0))
    return losses.sum(1), _slopes(q, b, x).sum(1)


def _slopes(q: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return _product(q, torch.sigmoid(b[:, None] - x))


def _product(factor: Tensor, given: Tensor) -> Tensor:
    """The product, 0 where the factor is, whatever is given: a class without mass, a row without a loss."""
    return torch.where(factor != 0, factor * given, 0.0)


def _of_all(parts: list[Sums], like: Tensor, group: Group | None) -> Sums:
    if group is None:
        return merged(parts)
    own = torch.stack(merged(parts)) if parts else like.new_zeros(len(Sums._fields), 2, len(like))
    return merged([Sums(*rank) for rank in all_gather(own, group, "finding the threshold")])
