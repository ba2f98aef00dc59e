"""The number of drawn classes in every part of a row: a tree of polynomials, in double precision.

Draw each class by itself with chance p_i = sigmoid(x_i - t). Given that k are drawn in all, they are a k-subset S with
chance proportional to prod_{i in S} exp(x_i), for any tilt t. A node of the tree holds the chances of 0, 1, ... k drawn
classes among its leaves: the polynomial prod (q_i + p_i X). All terms are positive, so every number in it is exact to a
few roundings. The root gives log sigma_k; going down from it, splitting a node's count between its children by their
chances, gives an exact sample.

For large k the tilt draws k - 1/2 classes on average, as the chance of exactly k could be too small otherwise.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from topk_registry.ops.ksubset.torch.polynomial import product_tree
from topk_registry.ops.ksubset.torch.rows import tilt_to_mean

QUICK = 500  # up to this k the chance of k draws, which may be 2^-k, is far from the end of the range


class Tree(NamedTuple):
    """Polynomials of rows of n scores, n rounded up to a power of two."""

    levels: list[Tensor]  # [T/m, min(m, k)+1, B] for m = 1, 2, ... T leaves a node
    t: Tensor  # [B]


def tilt(x: Tensor, k: Tensor) -> Tensor:
    """t [B] of rows x [B, n] and their k [B]: between k/2 and k classes are drawn on average.

    t = min over m < k of log(R_m / (k - m)), R_m the sum of exp(x) outside the m largest.
    """
    sorted_x = x.sort(-1, descending=True).values
    rest = sorted_x.flip(-1).logcumsumexp(-1).flip(-1)  # log R_m, m = 0 .. n - 1
    left = k[:, None] - torch.arange(x.shape[1], device=x.device)
    return torch.where(left > 0, rest - left.clamp(min=1).to(x).log(), torch.inf).amin(-1)


def close_tilt(x: Tensor, k: Tensor) -> Tensor:
    """t [B] with which k - 1/2 classes are drawn on average, of rows x [B, n] and their k [B]."""
    kth = x.sort(-1, descending=True).values.gather(-1, k[:, None] - 1)
    return kth[:, 0] + tilt_to_mean((x - kth).T, k)


def largest(k: Tensor) -> int:
    return int(k.max()) if k.numel() else 1


def grow(x: Tensor, k: Tensor, most: int) -> Tree:
    """The tree of rows x [B, n] in double precision, every k at most ``most``; O(n most) numbers a row."""
    t = (tilt if most <= QUICK else close_tilt)(x.detach(), k)  # nothing depends on it
    leaves = F.pad(x - t[:, None], (0, (1 << (x.shape[1] - 1).bit_length()) - x.shape[1]), value=-torch.inf).T
    factors = torch.stack((torch.sigmoid(-leaves), torch.sigmoid(leaves)), 1)
    return Tree(product_tree(factors, most), t)


def log_excess(x: Tensor, k: Tensor, in_mode: Tensor, most: int) -> Tensor:
    """log sigma_k(exp x) [B] of rows x [B, n], less the sum of x over the k largest, which are marked [B, n]."""
    tree = grow(x, k, most)
    drawn = tree.levels[-1][0].gather(0, k[None])[0]  # the chance that k classes are drawn
    u = x - tree.t[:, None]
    # a marked class adds log(1 + e^u) - u; torch's own threshold of 20 leaves out up to e^-20 a class
    return drawn.log() + F.softplus(torch.where(in_mode, -u, u), threshold=40.0).sum(-1)


def sample(x: Tensor, k: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
    """Exact draws [count, B, n] as booleans; one pass down the tree, O(n log k) numbers a draw and row."""
    tree = grow(x, k, largest(k))
    drawn = k.expand(count, 1, -1)  # [count, nodes, B]
    for level in reversed(tree.levels[:-1]):
        left, right = level[0::2], level[1::2]  # [nodes, degrees, B]
        mine = torch.arange(left.shape[1], device=x.device)[:, None]
        others = drawn[:, :, None] - mine  # [count, nodes, degrees, B]: what is left for the other child
        possible = (others >= 0) & (others < right.shape[1])
        chances = right.expand(count, *right.shape).gather(2, others.clamp(0, right.shape[1] - 1))
        chances = torch.where(possible, chances * left, 0.0).cumsum(2)
        uniform = torch.rand(drawn.shape, dtype=x.dtype, device=x.device, generator=generator)
        # the first degree whose cumulated chance exceeds u times the whole: never one of chance 0
        ours = (chances <= uniform[:, :, None] * chances[:, :, -1:]).sum(2).clamp(max=left.shape[1] - 1)
        drawn = torch.stack((ours, drawn - ours), 2).flatten(1, 2)
    return drawn[:, : x.shape[1]].transpose(1, 2).bool()
