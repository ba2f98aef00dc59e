"""The margins of every class in plain torch operations, differentiable.

Each large step is an autograd Function with a gradient of its own. The small polynomials of the top group are left to
autograd.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from topk_registry.ops.ksubset.torch import flat
from topk_registry.ops.ksubset.torch.rows import (
    WITH_TAIL,
    balanced,
    horner,
    polynomials,
    power_sums,
    row_blocks,
    tail_odds,
    tilt,
    tilted,
    top_group_size,
)

LIMIT = 1 / 4  # of the odds of flat rows: cotangents pass through the polynomials once more


class TailOdds(torch.autograd.Function):
    """:func:`tail_odds` of scores [B, n]; the gradient is that to s / theta, see :class:`ToOdds`."""

    @staticmethod
    def forward(ctx, s: Tensor, a: Tensor, outside_tail: Tensor | None, theta: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        w = torch.empty_like(s)
        for rows in row_blocks(s):
            outside = None if outside_tail is None else outside_tail[rows]
            tail_odds(s[rows], a[rows], outside, theta, out=w[rows])
        ctx.save_for_backward(w)
        return w

    @staticmethod
    def backward(ctx, g: Tensor):
        (w,) = ctx.saved_tensors
        return g * w, None, None, None


class PowerSums(torch.autograd.Function):
    """:func:`power_sums` of odds [B, n]; dP_j/dw_i = j w_i^(j-1)."""

    @staticmethod
    def forward(ctx, w: Tensor, k: int) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(w)
        return torch.cat([power_sums(w[rows], k) for rows in row_blocks(w)], 1)

    @staticmethod
    def backward(ctx, g: Tensor):
        (w,) = ctx.saved_tensors
        slopes = g * torch.arange(1, g.shape[0] + 1, dtype=g.dtype, device=g.device)[:, None]  # [k, B]
        dw = torch.empty_like(w)
        for rows in row_blocks(w):
            acc = dw[rows].copy_(slopes[-1, rows, None].expand_as(w[rows]))
            for slope in slopes[:-1, rows].flip(0):
                acc.mul_(w[rows]).add_(slope[:, None])
        return dw, None


class LeaveTailOut(torch.autograd.Function):
    """shift + log d_{k-1} - log d_k, d = c / (1 + v X), v = scale w, for every w: [B, n], [k+1, B], [B], [B] -> [B, n].

    With g_{k-1}, g_k the gradients to d_{k-1} and d_k: dc_j = sum_i g_{k-1} (-v)^(k-1-j) + g_k (-v)^(k-j), and since
    dd_j/dv = -e_{j-1} with e = d / (1 + v X), dv = -(g_{k-1} e_{k-2} + g_k e_{k-1}).
    """

    @staticmethod
    def forward(ctx, w: Tensor, c: Tensor, scale: Tensor, shift: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(w, c, scale)
        out = torch.empty_like(w)
        for rows in row_blocks(w):
            v = w[rows] * scale[rows, None]
            d = horner(v, c[:-1, rows])
            last = torch.sub(c[-1, rows, None], v.mul_(d), out=v)
            torch.div(d, last, out=out[rows]).log_().add_(shift[rows, None])
        return out

    @staticmethod
    def backward(ctx, g: Tensor):
        w, c, scale = ctx.saved_tensors
        k = c.shape[0] - 1
        dw, dc = torch.zeros_like(w), torch.empty_like(c)
        for rows in row_blocks(w):
            v, e, c_rows = w[rows] * scale[rows, None], dw[rows], c[:, rows, None]
            d = c_rows[0].expand_as(v).clone()  # d_0, with e_{-1} = 0
            for j in range(1, k):
                torch.sub(d, e.mul_(v), out=e)
                torch.sub(c_rows[j], d.mul_(v), out=d)
            last = torch.mul(v, d)
            torch.sub(c_rows[k], last, out=last)
            g_last = torch.div(g[rows], last, out=last).neg_()
            chain = torch.div(g[rows], d).addcmul_(g_last, v, value=-1.0)  # the gradient to d_{k-1}, also through d_k
            # e_{k-1} = d_{k-1} - v e_{k-2}
            e.mul_(chain).addcmul_(g_last, d).mul_(-scale[rows, None])
            dc[k, rows] = g_last.sum(-1)
            for j in range(k - 1, -1, -1):
                dc[j, rows] = chain.sum(-1)
                chain.mul_(v).neg_()
        return dw, dc, None, None


class ToOdds(torch.autograd.Function):
    """(s - a) / theta. With :class:`ToScores` it leaves theta out of gradients, where it cancels but could overflow."""

    @staticmethod
    def forward(ctx, s: Tensor, a: Tensor, theta: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (s - a) / theta

    @staticmethod
    def backward(ctx, g: Tensor):
        return g, None, None


class ToScores(torch.autograd.Function):
    """(s - a) + theta * rest, from the rest of the log-odds; see :class:`ToOdds`."""

    @staticmethod
    def forward(ctx, s: Tensor, a: Tensor, rest: Tensor, theta: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (s - a).add_(rest, alpha=theta)

    @staticmethod
    def backward(ctx, g: Tensor):
        return g, None, g, None


def margins(s: Tensor, k: int, theta: float) -> Tensor:
    """The margins theta l [B, n] of every class: [B, n] -> [B, n]."""
    return _in_blocks(s, None, k, theta)


def margins_backward(g: Tensor, s: Tensor, k: int, theta: float) -> Tensor:
    """The vector-Jacobian product of :func:`margins`: cotangents g [B, n], scores [B, n] -> [B, n].

    The margins are computed again, block by block: the products of the top group for all rows at once would need many
    times the memory of the scores.
    """
    return _in_blocks(s, g, k, theta)


def _in_blocks(s: Tensor, g: Tensor | None, k: int, theta: float) -> Tensor:
    """The margins, or with cotangents g their product with the derivatives, of flat rows in the shorter way."""
    odds = flat.odds(s, k, theta, LIMIT)
    if odds is None:
        return _by_function(differentiable_margins, s, g, k, theta, numbers=2 * k * k)
    out, others = _by_function(flat_margins, s, g, k, theta), odds.others
    if len(others):
        given = s[others], None if g is None else g[others]
        out[others] = _by_function(differentiable_margins, *given, k, theta, numbers=2 * k * k)
    return out


def _by_function(function: Callable, s: Tensor, g: Tensor | None, k: int, theta: float, numbers: int = 0) -> Tensor:
    out = torch.empty_like(s)
    for rows in row_blocks(s, numbers):
        if g is None:
            out[rows] = function(s[rows], k, theta)
        else:
            with torch.enable_grad():
                block = s[rows].detach().requires_grad_()
                (out[rows],) = torch.autograd.grad(function(block, k, theta), block, g[rows])
    return out


def flat_margins(s: Tensor, k: int, theta: float) -> Tensor:
    """:func:`differentiable_margins` of rows that are flat: [B, n] -> [B, n]."""
    a = s.detach().amax(1)
    w = TailOdds.apply(s, a, None, theta)
    f = flat.polynomial(PowerSums.apply(w, k))
    rest = LeaveTailOut.apply(w, f.c, f.scale, f.log_ratio - f.t)
    return ToScores.apply(s, a[:, None], rest, theta)


class Common(NamedTuple):
    """Margins of the top group, and the quantities that all margins of the tail share, see :func:`common`."""

    in_top: Tensor  # [B, T], the margins of the top group
    c: Tensor  # [k+1, B]
    scale: Tensor  # [B], factor from odds relative to the (k + 1)-th largest score to the odds that c is balanced for
    shift: Tensor  # [B], of the log-odds of the tail


def common(s_top: Tensor, P: Tensor, k: int, theta: float) -> Common:
    """Compute the margins of the top group, and all that the tail's margins need beside their odds.

    From the top group's scores [B, T], and the tail's power sums [k, B] relative to the (k + 1)-th largest score, which
    are not used where k + 1 classes need a top group of all. Tilts and references are constants to autograd, as they
    cancel.
    """
    top = s_top.detach()
    kth, next_one = top[:, k - 1], top[:, k]  # references of the two tilts
    gap = (next_one - kth) / theta
    x, x_next = ToOdds.apply(s_top.T, kth, theta), ToOdds.apply(s_top.T, next_one, theta)
    t = tilt(x.detach(), P[0].detach() * gap.exp(), k)
    t_next = tilt(x_next.detach(), P[0].detach(), k + 1)
    both = torch.cat((tilted(P, gap - t), tilted(P, -t_next)), 1) if k < WITH_TAIL else None
    c, e = polynomials(torch.cat((x - t, x_next - t_next), 1), both, k, depth=1)
    B = len(s_top)
    c, e = c[:, :B], torch.cat((e[:k, :, B:], e[k:, :, :B]))  # e [T, 2, B]
    log_rho, c = balanced(c, k)
    first_k = torch.arange(len(e), device=s_top.device)[:, None] < k
    shift, reference = torch.where(first_k, -t_next, -t), torch.where(first_k, next_one, kth)
    in_top = ToScores.apply(s_top.T, reference, shift + (e[:, 0] / e[:, 1]).log(), theta)
    return Common(in_top.T, c, torch.exp(gap + log_rho - t), log_rho - t)


def differentiable_margins(s: Tensor, k: int, theta: float) -> Tensor:
    """Compute the margins by operations that autograd can differentiate: [B, n] -> [B, n]."""
    top, where = s.detach().topk(min(top_group_size(k + 1), s.shape[1]))
    if k >= WITH_TAIL:  # there is no tail
        f = common(s.gather(1, where), s.new_zeros(k, len(s)), k, theta)
        return torch.zeros_like(s).scatter(1, where, f.in_top)
    w = TailOdds.apply(s, top[:, k], where, theta)
    f = common(s.gather(1, where), PowerSums.apply(w, k), k, theta)
    rest = LeaveTailOut.apply(w, f.c, f.scale, f.shift)
    return ToScores.apply(s, top[:, k - 1, None], rest, theta).scatter_(1, where, f.in_top)
