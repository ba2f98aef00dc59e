"""The smooth top-k loss of a linear classifier with many classes, computed for one chunk of classes at a time.

The scores of all classes are never in memory together. The forward pass summarizes the scores of each chunk in O(k)
numbers per row (:class:`State`). The backward pass computes the scores of each chunk again, then the gradient
with respect to the scores, and then the gradients with respect to features, weight and bias.

With a process group, each rank has some of the classes. The ranks exchange the summaries (``chunks.py``).
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from topk_registry.ops.ksubset import chunks, graph
from topk_registry.ops.ksubset.chunks import State

CPU_CHUNK = 1 << 20  # number of scores per chunk on CPUs, so that a chunk fits in the cache
GPU_CHUNK = 1 << 26  # number of scores per chunk on GPUs, so that kernel launches take little of the time
MIN_CHUNK = 1024  # minimum number of classes per chunk, because smaller matrix products are slow
MAX_STATES = 32  # number of states that are collected before they are merged
MAX_K = graph.WITH_TAIL  # largest k for which classes are computed in chunks


class TopClasses(NamedTuple):
    """The k classes with the largest scores of each row, in descending order of the scores."""

    indices: Tensor  # [B, k]
    logits: Tensor  # [B, k]
    marginals: Tensor  # [B, k], results of :func:`graph.marginals` for these classes


class Problem(NamedTuple):
    """Settings of a computation that processes the classes of a linear classifier in chunks."""

    k: int  # as in "k-th largest score"
    theta: float  # temperature, by which scores are divided
    chunk: int  # number of classes per chunk
    dtype: torch.dtype  # dtype of matrix products
    first: int = 0  # first class of this rank
    group: Any = None  # process group whose ranks share the classes; None: all classes are on this rank

    @property
    def wide(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)


def min_classes(k: int) -> int:
    """Return the smallest number of classes of a classifier for which the functions of this module support k."""
    return 2 * k + 4  # up to 2k + 3 classes are in the top group, and at least one class must be in the tail


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which ``F.linear`` multiplies x.

    If autocast is enabled, and x is not in double precision, this is autocast's dtype. Otherwise, this is x.dtype.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return x.dtype


def chunk_size(features: Tensor, chunk: int | None) -> int:
    """Return ``chunk``, or, if ``chunk`` is None, a number of classes per chunk that is fast for these features."""
    if chunk is not None:
        return chunk
    scores = CPU_CHUNK if features.device.type == "cpu" else GPU_CHUNK
    return max(scores // max(len(features), 1), MIN_CHUNK)


def linear_label_margins(x: Tensor, weight: Tensor, bias: Tensor | None, label: Tensor, p: Problem) -> Tensor:
    """Compute the margin of each row's label [B] in double precision. The result can be differentiated once.

    The margin is the score of the label minus the k-th largest score of the other classes, smoothed with temperature
    p.theta. With a process group, the result is the same on all ranks. The gradient with respect to x contains only the
    terms of this rank's classes, so the caller must sum this gradient over the ranks.

    Args:
        x: features [B, d].
        weight, bias: weight [m, d] and bias [m] of the classes of this rank. The bias may be None.
        label: class indices [B] over the classes of all ranks.
        p: settings, such as k, the temperature ``p.theta`` and the process group ``p.group``.
    """
    margins = _LabelMargins.apply(x, weight, bias, label, p)
    assert isinstance(margins, Tensor)
    return margins


def linear_expected_hinge(
    x: Tensor, weight: Tensor, bias: Tensor | None, mass: Callable[[Tensor, int], Tensor], alpha: Tensor, tau: float,
    p: Problem,
) -> Tensor:  # fmt: skip
    """Compute sum_c q_c tau softplus((alpha_c - m_c / k) / tau) of each row: [B] in double precision.

    The mass q_c is the weight of class c in the target of the row. The margin m_c is the score of class c minus the
    k-th largest score of the other classes, smoothed with temperature k tau. All classes must be on this rank. The
    result can be differentiated once.

    Args:
        x, weight, bias: features [B, d], weight [n, d], and bias [n] or None.
        mass: function ``mass(s, first)``. For scores s [B, j] of the classes first, ..., first + j - 1: masses [B, j].
        alpha: required margin, [] or [n].
        tau: smoothing temperature of the loss.
        p: settings of the computation. The temperature ``p.theta`` must be k tau.
    """
    losses = _ExpectedHinge.apply(x, weight, bias, mass, alpha, tau, p)
    assert isinstance(losses, Tensor)
    return losses


@torch.no_grad()
def linear_topk_classes(x: Tensor, weight: Tensor, bias: Tensor | None, p: Problem) -> TopClasses:
    """Return the k classes with the largest scores of each row among the classes of all ranks, without a gradient."""
    state = _state(x, weight, bias, p.k + 1, p)
    marginals = torch.sigmoid(chunks.top_margins(state, p.theta) / p.theta)
    return TopClasses(state.classes[:, : p.k], state.top[:, : p.k].to(p.dtype), marginals.to(p.wide))


def chunks_of(x: Tensor, weight: Tensor, bias: Tensor | None, p: Problem) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (first, W, s) for each chunk of this rank's classes.

    ``first`` is the index of the first class of the chunk, counted over all ranks. W [m, d] is the weight of the m
    classes of the chunk, and s [B, m] are their scores.
    """
    x = x.to(p.dtype)
    for start in range(0, len(weight), p.chunk):
        rows = slice(start, start + p.chunk)
        W = weight[rows].to(p.dtype)
        s = F.linear(x, W, None if bias is None else bias[rows].to(p.dtype))
        yield p.first + start, W, s.to(p.wide)


def _merged(states: Iterable[State], theta: float) -> State | None:
    kept: list[State] = []
    for state in states:
        kept.append(state)
        if len(kept) == MAX_STATES:
            kept = [chunks.merge(kept, theta)]
    return chunks.merge(kept, theta) if kept else None


def _state(x: Tensor, weight: Tensor, bias: Tensor | None, k: int, p: Problem) -> State:
    with torch.autocast(x.device.type, enabled=False):
        states = (chunks.summarize(s, k, p.theta, first) for first, _, s in chunks_of(x, weight, bias, p))
        own = _merged(states, p.theta)
    return chunks.exchange(own, None, k, x, p.theta, p.group)[0]


def _locate(label: Tensor, first: int, m: int) -> tuple[Tensor, Tensor]:
    # which labels [B] are among the m classes from ``first`` on, and the column of each label in this chunk [B, 1]
    local = label - first
    return (local >= 0) & (local < m), local.clamp(0, m - 1)[:, None]


class _LabelMargins(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, label: Tensor, p: Problem) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        score = torch.full_like(label, -torch.inf, dtype=p.wide)

        def of_others(first: int, s: Tensor) -> State:  # without the labels, whose scores go to ``score``
            here, column = _locate(label, first, s.shape[1])
            scored = s.gather(1, column)[:, 0]
            score.copy_(torch.where(here, scored, score))
            s.scatter_(1, column, torch.where(here, -torch.inf, scored)[:, None])
            return chunks.summarize(s, p.k, p.theta, first)

        with torch.autocast(x.device.type, enabled=False):
            own = _merged((of_others(first, s) for first, _, s in chunks_of(x, weight, bias, p)), p.theta)
        state, score_of_all = chunks.exchange(own, score, p.k, x, p.theta, p.group)
        f = chunks.finish(state, p.theta)
        ctx.p = p
        ctx.save_for_backward(*state, x, weight, bias, label)
        return (score_of_all.double() - f.a[:, 0].double()) + f.shift[:, 0]

    @staticmethod
    @once_differentiable
    def backward(ctx, g: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        top, classes, P, x, weight, bias, label = ctx.saved_tensors
        p = ctx.p
        f, g = chunks.finish(State(top, classes, P), p.theta), g.to(p.wide)[:, None]

        def slopes(s: Tensor, first: int) -> Tensor:
            ds = chunks.label_gradient(s, f, p.theta, first)
            here, column = _locate(label, first, s.shape[1])
            slope = ds.gather(1, column)[:, 0]
            return ds.scatter_(1, column, torch.where(here, 1.0, slope)[:, None]).mul_(g)

        return *_gradients(slopes, x, weight, bias, p, ctx.needs_input_grad), None, None


def _gradients(
    slopes: Callable[[Tensor, int], Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, p: Problem,
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    # The gradients with respect to x, weight and bias. A gradient that is not needed is None. For the scores s [B, m]
    # of the m classes from ``first`` on, ``slopes(s, first)`` returns the gradient of the loss with respect to s.
    dx = torch.zeros_like(x, dtype=p.wide) if needed[0] else None
    dW = torch.empty_like(weight) if needed[1] else None
    db = torch.empty_like(bias) if needed[2] and bias is not None else None
    with torch.autocast(x.device.type, enabled=False):
        for first, W, s in chunks_of(x, weight, bias, p):
            ds, rows = slopes(s, first), slice(first - p.first, first - p.first + len(W))
            product = ds.to(p.dtype)
            if dx is not None:
                dx += product @ W
            if dW is not None:
                dW[rows] = product.T @ x.to(p.dtype)
            if db is not None:
                db[rows] = ds.sum(0)
    return None if dx is None else dx.to(x.dtype), dW, db


class _ExpectedHinge(torch.autograd.Function):
    # The classes are read three times: in the forward pass for the state, and for the losses and the gradients with
    # respect to the results for the top group; in the backward pass for the gradients with respect to the scores.

    @staticmethod
    def forward(ctx, x, weight, bias, mass, alpha, tau, p):  # pyright: ignore[reportIncompatibleMethodOverride]
        k = p.k
        state = _state(x, weight, bias, k + 1, p)
        with torch.enable_grad():
            top, P = state.top.double().requires_grad_(), state.P[:, :k].double().requires_grad_()
            f = graph.top_margins(top, P, k, p.theta)
        value, d_margins, d_c = P.new_zeros(len(x)), torch.zeros_like(f.margins), torch.zeros_like(f.c)

        def losses(s: Tensor, first: int, margins: Tensor, c: Tensor) -> Tensor:
            m = _margins(s, f, margins, c, state.classes, first, p)
            own_alpha = alpha[first : first + s.shape[1]] if alpha.ndim else alpha
            hinge = graph.soft_hinge(own_alpha.to(s) - m / k, tau)
            q = mass(s, first)
            return torch.where(q == 0, 0.0, q * hinge).sum(1)

        with torch.autocast(x.device.type, enabled=False):
            for first, _, s in chunks_of(x, weight, bias, p):
                with torch.enable_grad():
                    margins, c = (t.detach().to(s).requires_grad_() for t in (f.margins, f.c))
                    part = losses(s, first, margins, c)
                    to_margins, to_c = torch.autograd.grad(part.sum(), (margins, c))
                value, d_margins, d_c = value + part.detach(), d_margins + to_margins, d_c + to_c
        d_top, d_P = torch.autograd.grad((f.margins, f.c), (top, P), (d_margins, d_c))
        ctx.f, ctx.losses, ctx.p = graph.Margins(*(t.detach() for t in f)), losses, p
        ctx.save_for_backward(x, weight, bias, state.classes, d_top, d_P)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx, g: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, bias, classes, d_top, d_P = ctx.saved_tensors
        p, f, g = ctx.p, ctx.f, g[:, None]
        powers = torch.arange(1, p.k + 1, dtype=d_P.dtype, device=d_P.device)
        of_powers, in_top = (d_P * g * powers / p.theta).to(p.wide), (d_top * g).to(p.wide)

        def slopes(s: Tensor, first: int) -> Tensor:
            with torch.enable_grad():
                s = s.detach().requires_grad_()
                part = ctx.losses(s, first, f.margins.to(s), f.c.to(s))
                (ds,) = torch.autograd.grad(part, s, g[:, 0].to(part))
            e, sums = ((s.detach() - f.a.to(s)) / p.theta).clamp_max(0.0).exp(), torch.zeros_like(s)
            for slope in of_powers.flip(1).split(1, 1):  # Horner: sum_j slope_j e^j
                sums = (sums + slope) * e
            return chunks.scatter_own(ds + sums, classes, in_top, first)

        return *_gradients(slopes, x, weight, bias, p, ctx.needs_input_grad), None, None, None, None


def _margins(
    s: Tensor, f: graph.Margins, margins: Tensor, c: Tensor, classes: Tensor, first: int, p: Problem
) -> Tensor:
    # the margins [B, m] of the classes of a chunk, where ``margins`` are the margins of the top group
    s = chunks.scatter_own(s, classes, torch.full_like(margins, -torch.inf), first)
    gap, t = s - f.a.to(s), f.t.to(s)
    tail = graph.tail_margins(gap, (gap / p.theta - t).exp(), c, t, p.theta)
    return chunks.scatter_own(tail, classes, margins, first)
