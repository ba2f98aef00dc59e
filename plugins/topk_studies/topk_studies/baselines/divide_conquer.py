"""Divide and Conquer: sigma_j is the coefficient of X^j in prod_i (1 + e_i X), multiplied as a tree of depth log2 n.

Every product is truncated after degree k, so the cost is O(kn). All products of a level are computed in parallel.
"""

import torch
from torch import Tensor

from topk_studies.baselines.semiring import LOG, Semiring


def divide_and_conquer(x: Tensor, k: int, *, semiring: Semiring = LOG) -> Tensor:
    """Return log sigma_0 .. log sigma_k [k+1, B] of exp(x) for x [B, n]. Autograd computes the gradient."""
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
    """Return the coefficients of P(X) Q(X) up to degree k, along the first axis."""
    degree_p, degree_q = len(P) - 1, len(Q) - 1
    reverse = Q.flip(0)
    coefficients = []
    for c in range(min(k, degree_p + degree_q) + 1):
        low, high = max(0, c - degree_q), min(c, degree_p)
        shift = degree_q - c
        products = semiring.times(P[low : high + 1], reverse[low + shift : high + shift + 1])
        coefficients.append(semiring.total(products))
    return torch.stack(coefficients)
