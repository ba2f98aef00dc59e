# type: ignore
"""Exponentials, logarithms and reciprocals that are one instruction, and others that keep their digits."""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def exp2(x):
    """2^x, with 0 in the place of denormal numbers: to make those takes four more instructions."""
    if INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], tl.float32, True, 1)


@triton.jit
def log2(x):
    """log2 of positive normal numbers."""
    if INTERPRETED:
        return tl.log2(x)
    else:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], tl.float32, True, 1)


@triton.jit
def reciprocal(x):
    """1 / x of normal numbers, within a bit."""
    if INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], tl.float32, True, 1)


@triton.jit
def exp(x):
    """e^x, with 0 in the place of denormal numbers."""
    return exp2(x * LOG2E)


@triton.jit
def expm1(x):
    """e^x - 1; from -1/2 to 1/2 by its series, the first term that is left out being x^8 / 9! of a sum of about 1."""
    series = 1 / 5040 + x * (1 / 40320)
    series = 1 / 120 + x * (1 / 720 + x * series)
    series = 1.0 + x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * series)))
    return tl.where(tl.abs(x) < 0.5, x * series, exp(x) - 1.0)


@triton.jit
def log(x):
    """log x to full precision; -inf of 0."""
    return tl.log(x)


@triton.jit
def log1p(x):
    """log(1 + x), for x above -1."""
    # log(u + r) = log(u) + r / u, r being what rounding 1 + x to u has lost; from u = 2 on r is below the rounding
    u = 1.0 + x
    return tl.log(u) + tl.where(u < 2.0, x - (u - 1.0), 0.0)


@triton.jit
def small_log1p(x):
    """log(1 + x) of x from -1/2 to 1, to full relative precision: 2 artanh(x / (2 + x)), by its series."""
    z = x * reciprocal(2.0 + x)
    y = z * z
    series = 1 / 13 + y * (1 / 15)  # the first term that is left out is y^8 / 17, y up to 1/9
    for j in tl.static_range(6):
        series = series * y + 1 / (11 - 2 * j)
    return (z + z) * series


@triton.jit
def probabilities(log_odds):
    """log p, log(1 - p), p and 1 - p of log-odds, none of them by a difference that cancels."""
    distance = tl.abs(log_odds)
    e = exp(-distance)
    large = reciprocal(1.0 + e)
    small = e * large
    rest = small_log1p(e)
    above = log_odds > 0
    log_large, log_small = -rest, -distance - rest
    log_p = tl.where(above, log_large, log_small)
    log_not = tl.where(above, log_small, log_large)
    return log_p, log_not, tl.where(above, large, small), tl.where(above, small, large)
