# type: ignore
"""Store a row's margin in double precision, or the hinge of it."""

import triton
import triton.language as tl


@triton.jit
def store_margin(
    row, y, s_y, a, ratio, least, theta, theta_low, broken, margin_ptr,
    alpha_ptr, value_ptr, slope_ptr, scale, scale_low, tau, tau_low, HINGE: tl.constexpr, PER_CLASS: tl.constexpr,
):  # fmt: skip
    """(s_y - a) + theta (log(c_{k-1} / c_k) - t), and the hinge's value and slope there. theta, scale and tau come as
    two numbers in single precision each."""
    log = tl.log(ratio.to(tl.float64) / least.to(tl.float64))
    margin = (s_y.to(tl.float64) - a.to(tl.float64)) + (log * theta + log * theta_low)
    margin = tl.where(broken, float("nan"), margin)
    tl.store(margin_ptr + row, margin)
    if HINGE:
        known = margin == margin  # else the label may be no class
        alpha = tl.load(alpha_ptr + y, mask=known, other=0.0) if PER_CLASS else tl.load(alpha_ptr)
        value, slope = hinge(margin, alpha, scale, scale_low, tau, tau_low)
        tl.store(value_ptr + row, value)
        tl.store(slope_ptr + row, slope)


@triton.jit
def hinge(margin, alpha, scale, scale_low, tau, tau_low):
    """See :class:`topk_registry.ops.hinge.Hinge`."""
    zero = tl.full((), 0.0, tl.float64)
    scale, tau = zero + scale + scale_low, zero + tau + tau_low
    violation = alpha - scale * margin
    z = violation / tau
    e = tl.exp(tl.minimum(z, 40.0))
    sum = 1.0 + e
    log1p = tl.where(sum == 1.0, e, tl.log(sum) * (e / (sum - 1.0)))  # the quotient takes back the sum's rounding
    value = tl.where(z > 40.0, violation, tau * log1p)
    return tl.where(z == z, value, z), -scale / (1.0 + tl.exp(-z))
