# type: ignore
"""Functions that the Triton kernels share: odds, tilts, and polynomials as tuples of coefficients, lowest degree first.

README.md in ``topk_registry/ops/ksubset`` defines odds and tilts. The factor of a class with the odds w is 1 + w X, or
this polynomial divided by 1 + w. A coefficient is a number or a vector of *lanes*. Lane i stands for class i of the top
group, which contains the classes of a row with large odds. Lane i computes the product of the factors of all classes
except class i. If the top group has T classes, this takes T steps without a division. No terms are subtracted, so
rounding errors stay small. A lane without a class computes the product of the factors of all classes.
"""

import triton
import triton.language as tl

CAP = tl.constexpr(60.0)  # maximum of the logarithm of odds: exp(60) is finite, and such odds mean probability 1


@triton.jit
def probabilities(x, least):
    """Return q = 1 / (1 + w) and p = w / (1 + w) for the odds w = exp(x) / least, without overflow."""
    near = tl.exp(-tl.abs(x))
    small = tl.where(x > 0, near * least, near / least)  # odds or their reciprocal
    large = 1.0 / (1.0 + small)
    return tl.where(x > 0, small * large, large), tl.where(x > 0, large, small * large)


@triton.jit
def least_rest(x, mass, lane, k: tl.constexpr):
    """Return the minimum of R_m / (k - m) over m = 0..k-1, where R_m is the sum of all odds except the m largest.

    To prevent overflow of products of odds, the kernels divide all odds by about this number.

    x contains the logarithms of the largest odds in descending order, followed by -inf. ``mass`` is the sum of all
    other odds. ``lane`` contains the indices 0, 1, 2, ... of x.
    """
    R = mass + tl.cumsum(tl.exp(tl.minimum(x, CAP)), 0, reverse=True)
    return tl.min(tl.where(lane < k, R / (k - lane), float("inf")), 0)


@triton.jit
def tail_polynomial(P, k: tl.constexpr):
    """Return the coefficients b_0..b_k of prod_i (1 + w_i X), times exp(-P_1 / 2) to prevent overflow.

    P contains the power sums P_j = sum_i w_i^j for j = 1..k. The coefficients follow from Newton's identities,
    j b_j = sum_{i=1..j} (-1)^(i-1) b_{j-i} P_i.
    """
    b = (tl.exp(-0.5 * P[0]),)
    for j in tl.static_range(1, k + 1):
        total = b[j - 1] * P[0]
        for i in tl.static_range(2, j + 1):
            if i % 2 == 0:
                total -= b[j - i] * P[i - 1]
            else:
                total += b[j - i] * P[i - 1]
        b = b + (total * (1.0 / j),)
    return b


@triton.jit
def times(c, q, p, degree: tl.constexpr):
    """Return the coefficients 0..degree of the product of c and q + p X."""
    out = (q * c[0],)
    for j in tl.static_range(1, degree + 1):
        out = out + (q * c[j] + p * c[j - 1],)
    return out


@triton.jit
def lane_of(values, lane, i):
    return tl.sum(tl.where(lane == i, values, 0.0), 0)


@triton.jit
def is_finite(x):
    return tl.abs(x) < float("inf")
