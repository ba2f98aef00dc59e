# type: ignore
"""A hinge on margins, a number a row."""

import triton
import triton.language as tl


@triton.jit
def hinge_rows(
    margin_ptr, label_ptr, alpha_ptr, value_ptr, slope_ptr, B, scale, scale_low, tau, tau_low,
    PER_CLASS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """See :class:`topk_registry.ops.hinge.Hinge`; scale and tau are sums of two numbers."""
    row = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    margin = tl.load(margin_ptr + row, mask=row < B, other=float("nan"))
    known = margin == margin  # else the label may be no class
    entry = tl.load(label_ptr + row, mask=known, other=0) if PER_CLASS else row * 0
    alpha = tl.load(alpha_ptr + entry, mask=known, other=0.0).to(tl.float64)
    zero = tl.zeros((N,), tl.float64)
    scale = zero + scale + scale_low
    tau = zero + tau + tau_low
    violation = alpha - scale * tl.where(known, margin, 0.0)
    z = violation / tau
    e = tl.exp(tl.minimum(z, 40.0))
    sum = 1.0 + e
    log1p = tl.where(sum == 1.0, e, tl.log(sum) * (e / (sum - 1.0)))  # the quotient takes back the sum's rounding
    value = tl.where(z > 40.0, violation, tau * log1p)
    slope = -scale / (1.0 + tl.exp(-z))
    tl.store(value_ptr + row, tl.where(known, value, float("nan")), mask=row < B)
    tl.store(slope_ptr + row, tl.where(known, slope, float("nan")), mask=row < B)
