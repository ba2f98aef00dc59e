"""The definition of the k-subset operator, formulas (1) and (2) of README.md, against which every backend is tested.

Slow on purpose: O(n choose k) and O(n^2 k) time with every step as written.
"""

from itertools import combinations

import torch
from torch import Tensor


def log_odds_by_enumeration(x: Tensor, k: int) -> Tensor:
    """l [..., n] by summing over every k-subset, in float64; for n up to about 12."""
    x = x.double()
    n = x.shape[-1]
    subsets = torch.zeros(0, n, dtype=torch.bool)
    for S in combinations(range(n), k):
        subsets = torch.cat((subsets, torch.zeros(1, n, dtype=torch.bool).index_fill_(1, torch.tensor(S), True)))
    # a class of score -inf has weight 0 in the subsets that hold it, and must not turn 0 * inf into NaN elsewhere
    log_weight = torch.where(subsets, x[..., None, :], 0.0).sum(-1)  # [..., subsets]
    inside = torch.where(subsets.T, log_weight[..., None, :], -torch.inf).logsumexp(-1)
    outside = torch.where(subsets.T, -torch.inf, log_weight[..., None, :]).logsumexp(-1)
    return inside - outside


def log_odds_by_recursion(x: Tensor, k: int) -> Tensor:
    """l [..., n] in float64 by log sigma_j(e, e_i) = log(sigma_j(e) + e_i sigma_{j-1}(e)), for each leave-one-out."""
    x = x.double()
    n = x.shape[-1]
    others = torch.arange(n - 1, device=x.device) + torch.ones(n, n - 1, device=x.device).triu().long()  # [n, n-1]
    sigma = x.new_zeros(*x.shape, 1)  # [..., n, 1]: log sigma_0 = 0
    for x_i in x[..., others].unbind(-1):  # [..., n]
        longer = x_i[..., None] + sigma
        sigma = torch.cat((sigma[..., :1], torch.logaddexp(sigma[..., 1:], longer[..., :-1]), longer[..., -1:]), -1)
        sigma = sigma[..., : k + 1]
    return x + sigma[..., k - 1] - sigma[..., k]
