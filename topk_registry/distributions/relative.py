r"""Sums over the k-sets of a row, relative to its most probable set M, in double precision.

Where scores are large, so are log sigma_k and the sums of k scores that are subtracted from it. Relative to M,

    (1)  log P(S) = sum_{i in S \ M} x_i - sum_{i in M \ S} x_i - E,    E = log sigma_k(exp x) - sum_{i in M} x_i >= 0
    (2)  entropy = E + sum_{i in M} (1 - pi_i) x_i - sum_{i not in M} pi_i x_i,

the origin of the scores cancels. With one between those of M and all others, no large numbers are subtracted.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from topk_registry.distributions import tree
from topk_registry.ops.ksubset import topk_log_odds, topk_marginals
from topk_registry.ops.tensors import Route, is_hidden, route


def most_probable(logits: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each class is in M [..., n], the k largest logits with ties by the lower index, and the least of M."""
    ordered, order = logits.detach().sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    in_mode = torch.zeros_like(order).scatter(-1, order, rank) < k[..., None]
    least = ordered.gather(-1, k[..., None] - 1)
    return in_mode, torch.where(least.isinf(), 0.0, least)


def excess(x: Tensor, k: Tensor, in_mode: Tensor, one_k: int | None) -> Tensor:
    """E [...] of (1) for x [..., n]."""
    if route(x, k) is not Route.OPERATIONS:
        return _Excess.apply(x, k, in_mode, one_k)  # pyright: ignore[reportReturnType]
    return _excess(x, k, in_mode, one_k)


def log_odds(x: Tensor, k: Tensor, one_k: int | None) -> Tensor:
    """Log-odds [..., n] of each class to be drawn; inf and -inf where only k scores are above -inf."""
    return _of_possible(topk_log_odds, x, k, one_k, torch.inf, -torch.inf)


def marginals(logits: Tensor, k: Tensor, one_k: int | None, temperature: float) -> Tensor:
    """Chance [..., n] of each class to be drawn; 1 and 0 where only k scores are above -inf."""

    def chances(rows: Tensor, size: int) -> Tensor:
        return topk_marginals(rows, size, temperature=temperature)

    return _of_possible(chances, logits, k, one_k, 1.0, 0.0)


def beyond(log_odds: Tensor, in_mode: Tensor) -> Tensor:
    """pi - 1 for the classes of M and pi for all others [..., n]; neither cancels."""
    return torch.where(in_mode, -torch.sigmoid(-log_odds), torch.sigmoid(log_odds))


def inner(weight: Tensor, x: Tensor) -> Tensor:
    """sum_i weight_i x_i [...]; a class with -inf that has no weight adds nothing, to the gradient neither."""
    return (weight * x.masked_fill((weight == 0) & (x == -torch.inf), 0.0)).sum(-1)


def _of_possible(
    of_rows: Callable[[Tensor, int], Tensor], x: Tensor, k: Tensor, one_k: int | None, drawn: float, left: float
) -> Tensor:
    """``of_rows(x [m, n], size)`` by rows of one size, or the constants where there is only one set to draw."""
    out = x == -torch.inf
    only = out.sum(-1, keepdim=True) == x.shape[-1] - k[..., None]
    usual = torch.where(only, 0.0, x)
    if one_k is None and k.is_meta:
        one_k = 1  # for the shape
    if one_k is not None:
        computed = of_rows(usual, one_k)
    else:
        rows, sizes = usual.reshape(-1, x.shape[-1]), k.reshape(-1)
        parts = [((sizes == size).nonzero()[:, 0], size) for size in sizes.unique().tolist()]
        each = [(of_rows(rows[chosen], size), chosen) for chosen, size in parts]
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        computed = torch.zeros_like(rows, dtype=dtype)
        for part, chosen in each:
            computed = computed.index_copy(0, chosen, part)
        computed = computed.view(x.shape)
    constant = torch.where(out, left, drawn).to(computed.dtype)
    return torch.where(only, constant, computed)


def _excess(x: Tensor, k: Tensor, in_mode: Tensor, one_k: int | None) -> Tensor:
    """E in operations; of sizes that a transform hides the largest that there can be is taken."""
    n = x.shape[-1]
    most = one_k or (n - 1 if is_hidden(k) else tree.largest(k))
    return tree.log_excess(x.reshape(-1, n), k.reshape(-1), in_mode.reshape(-1, n), most).view(x.shape[:-1])


class _Excess(torch.autograd.Function):
    """E, whose derivative to x_i is pi_i - [i in M], which is differentiable again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, k: Tensor, in_mode: Tensor, one_k: int | None) -> Tensor:
        return _excess(x, k, in_mode, one_k)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        *tensors, ctx.one_k = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        x, k, in_mode = ctx.saved_tensors
        return cotangent[..., None] * beyond(log_odds(x, k, ctx.one_k), in_mode), None, None, None
