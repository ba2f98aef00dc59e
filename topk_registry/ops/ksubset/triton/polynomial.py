# type: ignore
"""Functions that the Triton kernels share: odds, tilts, and truncated polynomials as tuples of their coefficients.

A coefficient is a number or a vector of *lanes*, one for each class of a row's top group. Lane i multiplies the factors
of all classes but the i-th into the polynomial of the tail, so that leaving a class out needs neither a division nor a
table of products: T steps on k vectors, each a sum of positive terms. The lane after the last class leaves out nothing.
"""

import triton
import triton.language as tl

CAP = tl.constexpr(60.0)  # exp of it is finite, and odds so large are as good as certain


@triton.jit
def chances(x, least):
    """q = 1/(1+w) and p = w/(1+w) of odds w = exp(x) / least, without overflow."""
    near = tl.exp(-tl.abs(x))
    small = tl.where(x > 0, near * least, near / least)  # the odds or their reciprocal: at most `least` above 1
    large = 1.0 / (1.0 + small)
    return tl.where(x > 0, small * large, large), tl.where(x > 0, large, small * large)


@triton.jit
def least_rest(x, mass, lane, k: tl.constexpr):
    """exp(t) of the tilt t = min over m < k of log(R_m / (k - m)), R_m the sum of exp(x) outside the m largest.

    x: the top group, largest first, as lanes; mass: the sum over the tail.
    """
    R = mass + tl.cumsum(tl.exp(tl.minimum(x, CAP)), 0, reverse=True)
    return tl.min(tl.where(lane < k, R / (k - lane), float("inf")), 0)


@triton.jit
def tail_polynomial(P, k: tl.constexpr, J: tl.constexpr):
    """b_0..b_k of prod (1 + w_i X) from the power sums P_1..P_J, by Newton's identities: j b_j = sum_i (-1)^(i-1)
    b_{j-i} P_i; scaled by exp(-P_1 / 2) to stay in range. Power sums beyond the J-th count for nothing."""
    b = (tl.exp(-0.5 * P[0]),)
    for j in tl.static_range(1, k + 1):
        total = b[j - 1] * P[0]
        for i in tl.static_range(2, j + 1):
            if i <= J:
                if i % 2 == 0:
                    total -= b[j - i] * P[i - 1]
                else:
                    total += b[j - i] * P[i - 1]
        b = b + (total * (1.0 / j),)
    return b


@triton.jit
def times(c, q, p, degree: tl.constexpr):
    """Coefficients 0..degree of c (q + p X)."""
    out = (q * c[0],)
    for j in tl.static_range(1, degree + 1):
        out = out + (q * c[j] + p * c[j - 1],)
    return out


@triton.jit
def lane_of(values, lane, i):
    """The number that a vector holds in lane i."""
    return tl.sum(tl.where(lane == i, values, 0.0), 0)


@triton.jit
def newton(sums_ptr, base, P_ptr, b_ptr, k: tl.constexpr, KP: tl.constexpr):
    """:func:`tail_polynomial` for large k, from the power sums at ``sums_ptr`` of odds that base is to multiply.

    Not unrolled: b_j, as soon as it is known, is carried into all later sums. Its results lie in memory, P_1..P_k
    from ``P_ptr`` + 1 and b_0..b_k from ``b_ptr``.
    """
    factor = base
    for j in range(1, k + 1):
        tl.store(P_ptr + j, tl.load(sums_ptr + j - 1) * factor)
        factor = factor * base
    tl.debug_barrier()
    m = tl.arange(0, KP)
    total = tl.zeros((KP,), tl.float32)  # j b_j, as far as it is known
    b_j = tl.exp(-0.5 * tl.load(P_ptr + 1))
    tl.store(b_ptr, b_j)
    for j in range(1, k + 1):
        i = m - j + 1
        P = tl.load(P_ptr + i, mask=(i > 0) & (m <= k), other=0.0)
        total += tl.where(i % 2 == 0, -b_j, b_j) * P
        b_j = lane_of(total, m, j) / j
        tl.store(b_ptr + j, b_j)
    tl.debug_barrier()


@triton.jit
def convolve(a_ptr, b_ptr, scale, out_ptr, k: tl.constexpr, KP: tl.constexpr):
    """Coefficients 0..k-1 of scale * a * b, all of them in memory."""
    m = tl.arange(0, KP)
    total = tl.zeros((KP,), tl.float32)
    for j in range(k):
        i = m - j
        total += tl.load(a_ptr + j) * scale * tl.load(b_ptr + i, mask=(i >= 0) & (m < k), other=0.0)
    tl.store(out_ptr + m, total, mask=m < k)
    tl.debug_barrier()


@triton.jit
def broadcast(b_ptr, zero, count: tl.constexpr):
    """Numbers in memory as a tuple of vectors like ``zero``."""
    out = ()
    for j in tl.static_range(count):
        out = out + (zero + tl.load(b_ptr + j),)
    return out


@triton.jit
def is_finite(x):
    return tl.abs(x) < float("inf")
