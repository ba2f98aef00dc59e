"""Losses of distributions over classes that come in chunks, or lie on the ranks of a process group.

A distribution costs sum_c q_c L_c, with the hinge L_c on the margin of every class. The first pass over the chunks
makes the state, which is merged over the ranks. From it every rank knows the margins of the top group, and the
coefficients that the margins of the tail need beside their odds. The second pass sums losses, and the cotangents of the
margins and coefficients: O(k) numbers a row, which are summed over the ranks. The backward pass is a third one.

A backend may bring ``OfTargets`` beside its functions for chunks, whose ``add_costs`` and ``slopes`` are the second and
the third pass in a kernel each; torch operations take their place.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from topk_registry.ops.hinge import soft_hinge
from topk_registry.ops.ksubset.chunked.layer import (
    BackwardPass,
    Problem,
    check_scores,
    chunks_of,
    kernels,
    layer_gradients,
    own_state,
)
from topk_registry.ops.ksubset.chunked.shards import exchange
from topk_registry.ops.ksubset.torch.all_classes import Common, LeaveTailOut, PowerSums, TailOdds, ToScores, common
from topk_registry.ops.ksubset.torch.state import put
from topk_registry.ops.process_group import all_reduce
from topk_registry.ops.targets.label_mixture import LabelMixture
from topk_registry.ops.targets.table import expected


class Costs(NamedTuple):
    """The hinge of this rank's m classes: tau softplus((alpha_c - margin_c / k) / tau), times a factor a class."""

    alpha: Tensor  # [] or [m]
    weight: Tensor | None  # [m]
    tau: float
    k: int

    def of_chunk(self, margins: Tensor, q: Tensor, first: int, sign: int) -> Tensor:
        """sum_c q_c w_c L_c [B] over the classes of a chunk [B, m]."""
        here = slice(first, first + margins.shape[1])
        alpha = self.alpha[here] if self.alpha.ndim else self.alpha
        q = q if self.weight is None else q * self.weight[here]
        table = soft_hinge(alpha - margins * (sign / self.k), self.tau)
        return expected(q, table)


def mass(target: Tensor | LabelMixture, first: int, like: Tensor, n: int) -> Tensor:
    """The mass q of the classes of a chunk, like its scores [B, m], of a target whose classes count from the rank's
    first; labels of other ranks are negative."""
    B, m = like.shape
    if isinstance(target, Tensor):
        return target[:, first : first + m].to(like)
    flat = like.new_zeros(B * m + 1)
    if target.uniform is not None:
        flat[:-1].view(B, m).add_((target.uniform / n).to(like)[:, None])
    local = target.labels - first
    row = torch.arange(B, device=like.device)[:, None]
    place = torch.where((local >= 0) & (local < m), local + m * row, m * B)
    return flat.scatter_add_(0, place.flatten(), target.shares.to(like).flatten())[:-1].view(B, m)


class ExpectedHinge(torch.autograd.Function):
    """sum_c q_c w_c L_c [B] for a target of any kind but labels, from a layer or from scores as ``LabelMargins``."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor | None, bias: Tensor | None, target, costs: Costs, p: Problem):
        with torch.autocast(x.device.type, enabled=False):
            state, _ = exchange(own_state(x, weight, bias, p.k + 1, p), None, p.k + 1, p, len(x))
            with torch.enable_grad():
                top, P = state.top.double().requires_grad_(), state.P[: p.k].double().requires_grad_()
                f = common(top, P, p.k, p.theta)
            of_targets = _kernels(target, costs, f, state.top, state.classes, p)
            chunks = chunks_of(x, weight, bias, p)
            if of_targets is None:
                sums = _second_pass(f, state.top, state.classes, target, costs, p, chunks)
            else:
                sums = _no_sums(state.top, p.k)
                for first, _, _, s in chunks:
                    of_targets.add_costs(sums, s, first)
        if p.group is not None:
            all_reduce(sums, p.group, "summing the losses of classes")
        value, of_c, of_top = sums.split([1, p.k + 1, state.top.shape[1]], 1)
        kth = state.top[:, p.k if p.sign > 0 else p.k - 1]
        check_scores(value, kth.masked_fill(state.P[0].isnan(), torch.nan), costs.k, p.sign)  # NaN is not too few
        with torch.enable_grad():
            # a class that is not there has no margin to change
            scalar = (f.in_top * of_top).nan_to_num(0.0, 0.0, 0.0).sum() + (f.c.T * of_c).sum()
        d_top, d_P = torch.autograd.grad(scalar, (top, P), materialize_grads=True)
        ctx.save_for_backward(state.top, state.classes, f.in_top.detach(), f.c.detach(), f.scale, f.shift,
                              d_top, d_P, x, weight, bias)  # fmt: skip
        ctx.rest = target, costs, p, of_targets
        return value[:, 0].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, g: Tensor):
        if ctx.rest[2].update is not None:
            ctx.rest[2].update.enter()
        top, classes, in_top, c, scale, shift, d_top, d_P, x, weight, bias = ctx.saved_tensors
        (target, costs, p, of_targets), wanted = ctx.rest, list(ctx.needs_input_grad[:3])
        if not any(wanted):
            return (None,) * 6
        f = Common(in_top, c, scale, shift)
        given = g.to(p.like), (d_top * g[:, None]).to(p.like), (d_P * g).to(p.like)
        given = [one.contiguous() for one in given]

        def chunks(size: int) -> Iterator[tuple[int, Tensor, Tensor]]:
            for first, W, flat, s in chunks_of(x, weight, bias, p._replace(chunk=size)):
                if of_targets is None:
                    ds = _slopes(f, top, classes, target, costs, p, (first, flat, s), *given)
                else:
                    ds = of_targets.slopes(s, first, *given)
                yield first, W, ds.to(p.dtype)

        if weight is not None:
            return *layer_gradients(BackwardPass(x, chunks, p), weight, bias, wanted), None, None, None
        with torch.autocast(x.device.type, enabled=False):
            return next((ds.to(x.dtype) for _, _, ds in chunks(p.chunk)), torch.zeros_like(x)), *(None,) * 5


def _kernels(target: Tensor | LabelMixture, costs: Costs, f: Common, top: Tensor, classes: Tensor, p: Problem) -> Any:
    """Return the kernels for the hinges of a chunk; None where the device has none."""
    module: Any = kernels(p.like, p.k + 1)
    return module.OfTargets(target, costs, f, top, classes, p) if hasattr(module, "OfTargets") else None


def _no_sums(top: Tensor, k: int) -> Tensor:
    return torch.zeros(len(top), 2 + k + top.shape[1], dtype=torch.float64, device=top.device)


def _slopes(
    f: Common, top: Tensor, classes: Tensor, target, costs: Costs, p: Problem, chunk, g: Tensor, at_top: Tensor,
    at_P: Tensor,
) -> Tensor:  # fmt: skip
    """The gradient of a chunk's scores, which their memory takes; at_top [B, T] is that of the top group's, and at_P
    [k, B] that to the power sums."""
    first, flat, s = chunk
    q = mass(target, first, s, p.n)
    put(flat, classes, torch.full_like(top, -torch.inf), first)
    with torch.enable_grad():
        s = s.detach().requires_grad_()
        margins, w = _margins(s, f, top, classes, first, p)
        value = costs.of_chunk(margins, q, first, p.sign)
        (ds,) = torch.autograd.grad((value, PowerSums.apply(w, p.k)), s, (g, at_P))
    ds = torch.mul(ds, p.sign, out=flat[:-1].view(ds.shape))
    put(flat, classes, at_top * p.sign, first)
    return ds


def _second_pass(f: Common, top: Tensor, classes: Tensor, target, costs: Costs, p: Problem, chunks) -> Tensor:
    """Losses, and the cotangents of the coefficients and of the top group's margins: [B, 1 + (k + 1) + T]."""
    sums = _no_sums(top, p.k)
    for first, _, flat, s in chunks:
        put(flat, classes, torch.full_like(top, -torch.inf), first)
        with torch.enable_grad():
            c, in_top = (t.detach().to(s).requires_grad_() for t in (f.c, f.in_top))
            margins, _ = _margins(s, f._replace(c=c, in_top=in_top), top, classes, first, p)
            value = costs.of_chunk(margins, mass(target, first, s, p.n), first, p.sign)
            of_c, of_top = torch.autograd.grad(value.sum(), (c, in_top))
        sums += torch.cat((value.detach()[:, None], of_c.T, of_top), 1)
    return sums


def _margins(
    s: Tensor, f: Common, top: Tensor, classes: Tensor, first: int, p: Problem
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Margins [B, m] of a chunk whose scores are -inf at classes of the top group, and the odds of the others."""
    w = TailOdds.apply(s, top[:, p.k], None, p.theta)
    rest = LeaveTailOut.apply(w, f.c.to(s), f.scale.to(s), f.shift.to(s))
    margins = ToScores.apply(s, top[:, p.k - 1, None], rest, p.theta)
    flat = torch.cat((margins.flatten(), margins.new_zeros(1)))
    local, (B, m) = classes - first, s.shape
    row = torch.arange(B, device=s.device)[:, None]
    place = torch.where((local >= 0) & (local < m), local + m * row, m * B)
    return flat.scatter(0, place.flatten(), f.in_top.to(s).flatten())[:-1].view(B, m), w
