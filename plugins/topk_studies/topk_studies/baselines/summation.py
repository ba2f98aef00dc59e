"""Summation Algorithm: elementary symmetric polynomials, computed by adding one class after the other.

The polynomial sigma_j(e_1 .. e_i) has one term for each set of j of the numbers e_1 to e_i: the product of the set. A
set either leaves out e_i or contains e_i, so

    sigma_j(e_1 .. e_i) = sigma_j(e_1 .. e_{i-1}) + e_i sigma_{j-1}(e_1 .. e_{i-1})

The algorithm takes O(kn) operations, in n sequential steps.
"""

import torch
from torch import Tensor

from topk_studies.baselines.semiring import LOG, Semiring


def summation(x: Tensor, k: int, *, semiring: Semiring = LOG) -> Tensor:
    """Return the logarithms [k + 1, B] of sigma_0, ..., sigma_k for each row of x [B, n].

    For a row x, sigma_j is the sum of exp(sum_{i in S} x_i) over all sets S of j classes. With the semiring ``LOG``,
    the computation uses logarithms throughout. With ``LINEAR``, only the results are logarithms.
    """
    sigma = torch.full_like(x[:, 0], semiring.one)[None]
    for e in semiring.exp(x).unbind(1):
        raised = semiring.times(sigma, e)  # e_i sigma_{j-1}, at degree j
        sums = semiring.plus(sigma[1:], raised[:-1])
        # the degree is at most the number of classes added so far; otherwise, sums would be 0 and log 0 has no gradient
        sigma = torch.cat([sigma[:1], sums, raised[-1:]])[: k + 1]
    return semiring.log(sigma)
