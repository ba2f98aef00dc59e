"""Summation Algorithm: add one class after the other.

    sigma_j(e_1 .. e_i) = sigma_j(e_1 .. e_{i-1}) + e_i sigma_{j-1}(e_1 .. e_{i-1})

The algorithm takes O(kn) operations, in n sequential steps.
"""

import torch
from torch import Tensor

from topk_studies.baselines.semiring import LOG, Semiring


def summation(x: Tensor, k: int, *, semiring: Semiring = LOG) -> Tensor:
    """Return log sigma_0 .. log sigma_k [k+1, B] of exp(x) for x [B, n]. Autograd computes the gradient."""
    sigma = torch.full_like(x[:, 0], semiring.one)[None]
    for e in semiring.exp(x).unbind(1):
        raised = semiring.times(sigma, e)  # e_i sigma_{j-1}, at degree j
        sums = semiring.plus(sigma[1:], raised[:-1])
        # the degree grows with the number of classes, so that no term is 0, whose logarithm has no gradient
        sigma = torch.cat([sigma[:1], sums, raised[-1:]])[: k + 1]
    return semiring.log(sigma)
