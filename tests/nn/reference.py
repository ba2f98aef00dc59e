"""The log-odds of the k-subset operator from their recursion, differentiable: the referee of heads and layers."""

import torch
from torch import Tensor


def log_odds_by_recursion(x: Tensor, k: int) -> Tensor:
    """Return l [..., n] by log sigma_j(e, e_i) = log(sigma_j(e) + e_i sigma_{j-1}(e)), in double precision."""
    x = x.double()
    n = x.shape[-1]
    others = torch.arange(n - 1) + torch.ones(n, n - 1).triu().long()  # [n, n - 1]: all classes but one
    sigma = x.new_zeros(*x.shape, 1)  # [..., n, 1]: log sigma_0 = 0
    for x_i in x[..., others].unbind(-1):
        longer = x_i[..., None] + sigma
        sigma = torch.cat((sigma[..., :1], torch.logaddexp(sigma[..., 1:], longer[..., :-1]), longer[..., -1:]), -1)
        sigma = sigma[..., : k + 1]
    return x + sigma[..., k - 1] - sigma[..., k]
