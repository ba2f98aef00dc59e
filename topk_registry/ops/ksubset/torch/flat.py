"""Rows that need no top group: how they are told from others, their odds and their polynomials.

Where no softmax of a row is above limit / k, a tilt that makes the odds' sum k leaves none above the limit. Newton's
identities over the whole row are then enough: nothing is sorted, and there are no products. Telling such rows is a look
at the scores, which would make a GPU wait, so it is done on CPUs alone.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from topk_registry.ops.ksubset.torch.polynomial import from_power_sums
from topk_registry.ops.ksubset.torch.rows import WITH_TAIL, balanced, row_blocks, tail_odds, tilted

SAMPLED = 8  # one class of eight


class Odds(NamedTuple):
    """Odds of a batch where most rows are flat."""

    w: Tensor  # [B, n], exp((s - a) / theta), 0 for a class that is left out
    a: Tensor  # [B], the largest score
    others: Tensor  # places of the rows that are not flat; with a NaN, or fewer than 2k scores, a row is not


def odds(s: Tensor, k: int, theta: float, limit: float, label: Tensor | None = None) -> Odds | None:
    """The odds of the classes of s [B, n] without a ``label`` [B], or None where less than half of the rows are flat.

    The other rows are then worked on again by themselves, which costs less than to part the two kinds.
    """
    if s.device.type != "cpu" or k > WITH_TAIL or not len(s):
        return None
    a, left_out = s.amax(1), None
    if label is not None:
        left_out = label[:, None]
        leads = (s.gather(1, left_out)[:, 0] >= a).nonzero()[:, 0]
        if len(leads):
            a[leads] = s[leads].scatter_(1, left_out[leads], -torch.inf).amax(1)
    # most batches without flat rows are known by a sample of their classes
    sample = ((s[:, ::SAMPLED] - a[:, None]) / theta).exp_().sum(1)
    if 2 * int((SAMPLED * limit * sample >= 0.75 * k).sum()) < len(s):
        return None
    w, mass = torch.empty_like(s), torch.empty_like(a)
    for rows in row_blocks(s):
        outside = None if left_out is None else left_out[rows]
        torch.sum(tail_odds(s[rows], a[rows], outside, theta, out=w[rows]), 1, out=mass[rows])
    others = (~(limit * mass >= k)).nonzero()[:, 0]
    return None if 2 * len(others) > len(s) else Odds(w, a, others)


class Polynomial(NamedTuple):
    """The polynomial of a flat row, balanced: c_{k-1} = c_k = 1."""

    c: Tensor  # [k+1, B]
    scale: Tensor  # [B], factor from the odds to those that c is balanced for
    log_ratio: Tensor  # [B], log c_{k-1} / c_k at the tilt t
    t: Tensor  # [B]


def polynomial(P: Tensor) -> Polynomial:
    """Of the odds' power sums [k, B]; tilts are constants to autograd, as they cancel."""
    k = len(P)
    t = (P[0].detach() / k).log()
    P = tilted(P, -t)
    log_ratio, c = balanced(from_power_sums(P, (-0.5 * P[0]).exp()), k)
    return Polynomial(c, torch.exp(log_ratio - t), log_ratio, t)
