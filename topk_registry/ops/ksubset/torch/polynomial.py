"""Truncated polynomials in batches: products, Newton's identities, and every leave-one-out of a product at once.

Polynomials lie as [..., coefficients, B], lowest degree first: the rows of the batch are next to each other in memory,
so that a step on one coefficient is one vector operation. The products here have positive terms only, so each
coefficient is exact to a few roundings, however small it is.
"""

import torch
from torch import Tensor

from topk_registry.ops.tensors import Route, route

OUTER = 128  # up to this many numbers a row, outer products are as quick as a coefficient at a time


def multiply(a: Tensor, b: Tensor, low: int, high: int, a_low: int = 0) -> Tensor:
    """Coefficients low..high of a * b, where a holds its degrees a_low, a_low + 1, ... and b holds 0, 1, ...

    out_j = sum_i b_i a_{j-i}: [..., p, B], [..., q, B] -> [..., high - low + 1, B]. Degrees that a lacks are 0.
    """
    # the call of an autograd Function costs more than the product, and transforms do not take this one
    if (a.requires_grad or b.requires_grad) and route(a, b) is not Route.OPERATIONS:
        return _Multiply.apply(a, b, low, high, a_low)
    return _multiply(a, b, low, high, a_low)


def _multiply(a: Tensor, b: Tensor, low: int, high: int, a_low: int) -> Tensor:
    p, q = a.shape[-2], b.shape[-2]
    if a.numel() * (p + q) <= OUTER * a.shape[-1]:
        return _by_outer_product(a, b).narrow(-2, low - a_low, high - low + 1)
    out = a.new_zeros(*a.shape[:-2], high - low + 1, a.shape[-1])
    for i, held, made, length in _overlaps(p, q, low, high, a_low):
        out.narrow(-2, made, length).addcmul_(a.narrow(-2, held, length), b.narrow(-2, i, 1))
    return out


def _by_outer_product(a: Tensor, b: Tensor) -> Tensor:
    """Return all coefficients of a * b, by operations that torch.func.vmap has rules for, as it has none for addcmul_.

    The lines of the outer product are padded by p zeros and read again in lines that are one shorter. Each line then
    starts one place further to the right than the line before, and equal degrees share a column.
    """
    p, q = a.shape[-2], b.shape[-2]
    outer = a.unsqueeze(-2) * b.unsqueeze(-3)  # [..., p, q, B]
    outer = torch.cat((outer, a.new_zeros(*outer.shape[:-2], p, outer.shape[-1])), -2).flatten(-3, -2)
    return outer.narrow(-2, 0, p * (p + q - 1)).unflatten(-2, (p, p + q - 1)).sum(-3)


def _overlaps(p: int, q: int, low: int, high: int, a_low: int) -> list[tuple[int, int, int, int]]:
    """(i, start in a, start in the product, length) of the degrees of a that b_i carries into the product."""
    spans = []
    for i in range(q):
        first, last = max(low, a_low + i), min(high, a_low + i + p - 1)
        if first <= last:
            spans.append((i, first - i - a_low, first - low, last - first + 1))
    return spans


class _Multiply(torch.autograd.Function):
    """Product that keeps only its two factors for the backward pass; plain autograd keeps every partial product."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor, *span: int) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.span = span
        ctx.save_for_backward(a, b)
        return _multiply(a, b, *span)

    @staticmethod
    def backward(ctx, g: Tensor):
        a, b = ctx.saved_tensors
        da, db = a.new_zeros(a.shape), b.new_zeros(b.shape)
        for i, held, made, length in _overlaps(a.shape[-2], b.shape[-2], *ctx.span):
            g_i = g.narrow(-2, made, length)
            da.narrow(-2, held, length).addcmul_(g_i, b.narrow(-2, i, 1))
            db.select(-2, i).copy_((g_i * a.narrow(-2, held, length)).sum(-2))
        return da, db, None, None, None


def from_power_sums(P: Tensor, b_0: Tensor) -> Tensor:
    """b_0 prod_i (1 + w_i X) to degree k from P_j = sum_i w_i^j, j = 1..k: [k, B], [B] -> [k+1, B].

    Newton: j b_j = sum_{i=1..j} (-1)^(i-1) b_{j-i} P_i. The terms alternate, but with every w_i < 1 the P_i decay and
    few digits are lost.
    """
    k = P.shape[0]
    sign = torch.ones(k, 1, dtype=P.dtype, device=P.device)
    sign[1::2] = -1.0
    P = P * sign
    newest_first = b_0[None]  # [j, B]: b_{j-1}, ..., b_0
    for j in range(1, k + 1):
        b_j = (P[:j] * newest_first).sum(0, keepdim=True) / j
        newest_first = torch.cat((b_j, newest_first))
    return newest_first.flip(0)


def product_tree(factors: Tensor, k: int) -> list[Tensor]:
    """Every level of the pairwise product of T = 2^h linear factors: [T, 2, B] -> [T/m, min(m, k)+1, B], m = 1..T."""
    levels, m = [factors], 1
    while levels[-1].shape[0] > 1:
        m *= 2
        levels.append(multiply(levels[-1][0::2], levels[-1][1::2], 0, min(m, k)))
    return levels


def leave_one_out(levels: list[Tensor], outside: Tensor, k: int, depth: int) -> Tensor:
    """Coefficients k-depth..k of outside * prod_{j != i} factor_j, for every factor i: [k+1, B] -> [T, depth+1, B].

    Going down the tree, what is outside a node is what is outside its parent times its sibling. A node of m factors
    will meet at most m - 1 of them on the way to a leaf, so only degrees from k - depth - (m - 1) still matter: no
    level holds more than O(T) numbers a row.
    """
    window, low = outside[None], 0  # [T/m, k-low+1, B]
    m = levels[0].shape[0]
    for level in reversed(levels[:-1]):
        m //= 2
        siblings = level.unflatten(0, (-1, 2)).flip(1)  # [T/2m, 2, min(m, k)+1, B]
        both = window[:, None].expand(-1, 2, -1, -1)
        parent_low, low = low, max(0, k - depth - (m - 1))
        window = multiply(both, siblings, low, k, parent_low).flatten(0, 1)
    below_zero = depth + 1 - window.shape[1]
    if below_zero > 0:
        window = torch.cat((window.new_zeros(len(window), below_zero, window.shape[2]), window), 1)
    return window
