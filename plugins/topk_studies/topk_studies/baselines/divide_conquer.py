"""Divide and Conquer: elementary symmetric polynomials as the coefficients of a product of polynomials.

For numbers e_1, ..., e_n, sigma_j is the coefficient of X^j in the product of all (1 + e_i X). The product is computed
as a binary tree of depth log2 n. Each product is truncated after degree k, so the cost is O(kn). All products of a
level of the tree are computed in parallel.
"""

import torch
from torch import Tensor

from topk_studies.baselines.semiring import LOG, Semiring


def divide_and_conquer(x: Tensor, k: int, *, semiring: Semiring = LOG) -> Tensor:
    """Return the logarithms [k + 1, B] of sigma_0, ..., sigma_k for each row of x [B, n].

    For a row x, sigma_j is the sum of exp(sum_{i in S} x_i) over all sets S of j classes. With the semiring ``LOG``,
    the computation uses logarithms throughout. With ``LINEAR``, only the results are logarithms.
    """
    e = semiring.exp(x)
    factors = torch.stack([torch.full_like(e, semiring.one), e])  # [degree+1, B, factors]
    unpaired = []
    while factors.shape[2] > 1:
        half, odd = divmod(factors.shape[2], 2)
        if odd:
            unpaired.append(factors[..., -1:])
        factors = multiply(factors[..., :half], factors[..., half : 2 * half], k, semiring)
    for factor in unpaired:
        factors = multiply(factors, factor, k, semiring)
    return semiring.log(factors[..., 0])


def multiply(P: Tensor, Q: Tensor, k: int, semiring: Semiring) -> Tensor:
    """Return the coefficients of the product of the polynomials P and Q, up to degree k.

    The first axis of P, of Q and of the result is the degree. ``semiring`` says whether all three hold logarithms.
    """
    degree_p, degree_q = len(P) - 1, len(Q) - 1
    reverse = Q.flip(0)
    coefficients = []
    for c in range(min(k, degree_p + degree_q) + 1):
        low, high = max(0, c - degree_q), min(c, degree_p)
        shift = degree_q - c
        products = semiring.times(P[low : high + 1], reverse[low + shift : high + shift + 1])
        coefficients.append(semiring.total(products))
    return torch.stack(coefficients)
