"""Summation Algorithm: take the classes one after the other.

    sigma_j(e_1 .. e_i) = sigma_j(e_1 .. e_{i-1}) + e_i sigma_{j-1}(e_1 .. e_{i-1})

O(kn) operations, but n of them must wait for each other.
"""

import torch
from torch import Tensor

from topk_studies.baselines.semiring import LOG, Semiring


def summation(x: Tensor, k: int, *, semiring: Semiring = LOG) -> Tensor:
    """log sigma_0 .. log sigma_k of exp(x) [B, n], as [k+1, B]; differentiated by autograd."""
    sigma = torch.full_like(x[:, 0], semiring.one)[None]
    for e in semiring.exp(x).unbind(1):
        raised = semiring.times(sigma, e)  # e_i sigma_{j-1}, at degree j
        sums = semiring.plus(sigma[1:], raised[:-1])
        # the degree grows with the classes taken: no zero ever enters, whose logarithm has no gradient
        sigma = torch.cat([sigma[:1], sums, raised[-1:]])[: k + 1]
    return semiring.log(sigma)
