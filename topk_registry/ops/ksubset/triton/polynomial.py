# type: ignore
"""Functions that the Triton kernels share: odds, tilts, and truncated polynomials as tuples of coefficients.

A coefficient is a number or a vector of *lanes*, with one lane per class of a row's top group. Lane i multiplies the
factors of all classes but the i-th into the polynomial of the tail. Thus a product without one class needs neither a
division nor a table of products. It takes T steps on k vectors, and each step is a sum of positive terms. The lane
after the last class is the product of all classes.
"""

import triton
import triton.language as tl

CAP = tl.constexpr(60.0)  # exp(60) is finite, and such odds mean probability 1


@triton.jit
def probabilities(x, least):
    """Return q = 1/(1+w) and p = w/(1+w) for odds w = exp(x) / least, without overflow."""
    near = tl.exp(-tl.abs(x))
    small = tl.where(x > 0, near * least, near / least)  # odds or their reciprocal
    large = 1.0 / (1.0 + small)
    return tl.where(x > 0, small * large, large), tl.where(x > 0, large, small * large)


@triton.jit
def least_rest(x, mass, lane, k: tl.constexpr):
    """Return exp(t) for the tilt t = min over m < k of log(R_m / (k - m)).

    R_m is the sum of exp(x) outside of the m largest.
    x: the top group in descending order as lanes; mass: the sum over the tail.
    """
    R = mass + tl.cumsum(tl.exp(tl.minimum(x, CAP)), 0, reverse=True)
    return tl.min(tl.where(lane < k, R / (k - lane), float("inf")), 0)


@triton.jit
def tail_polynomial(P, k: tl.constexpr):
    """Return b_0..b_k of prod (1 + w_i X) from power sums P_1..P_k, scaled by exp(-P_1 / 2) to avoid overflow.

    Newton's identities are j b_j = sum_i (-1)^(i-1) b_{j-i} P_i.
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
    """Return coefficients 0..degree of c (q + p X)."""
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
