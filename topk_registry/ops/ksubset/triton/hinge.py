# type: ignore
"""The smooth hinge loss as a function of the margin, for the Triton kernels."""

import triton
import triton.language as tl


@triton.jit
def store_hinge(
    row, selected, y, s_y, a, ratio, exp_minus_tilt, share, theta, theta_low, broken, value_ptr, alpha,
    tau, inverse_tau, inverse_tau_low, k: tl.constexpr, ALPHA: tl.constexpr,
):  # fmt: skip
    """Write the loss share * tau * softplus((alpha_y - m / k) / tau) of each row. Return the derivatives d loss / d m.

    y is the label of a row, s_y is its score, and m = (s_y - a) + theta log(ratio exp_minus_tilt) is its margin. All
    other classes have odds w = exp((s - a) / theta) exp_minus_tilt, where s is the score of the class.

    Args:
        row: index of each row.
        selected: True for the rows that are written.
        a: reference score, which is subtracted from all scores of a row.
        ratio: c_{k-1} / c_k, where c_j is the coefficient of X^j in the product of the factors 1 + w X.
        exp_minus_tilt: number in the formulas of m and w, which prevents overflow of c.
        share: mass of the label.
        theta, theta_low: temperature theta of the formulas, as the sum of two numbers in single precision.
        broken: True for the rows for which the loss and the derivative are set to NaN.
        value_ptr: output, losses.
        alpha, ALPHA, tau, inverse_tau, inverse_tau_low: as in :func:`gap_of` and :func:`hinge`.
    """
    log = log64(ratio.to(tl.float64) * exp_minus_tilt.to(tl.float64))
    margin = (s_y.to(tl.float64) - a.to(tl.float64)) + (log * theta + log * theta_low)
    margin = tl.where(broken, float("nan"), margin)
    known = selected & (margin == margin)  # otherwise, the label may be out of range
    value, slope = hinge(margin, gap_of(alpha, y, known, ALPHA), tau, inverse_tau, inverse_tau_low, k)
    tl.store(value_ptr + row, value * share, mask=selected)
    return slope.to(tl.float32) * share


@triton.jit
def gap_of(alpha, y, known, ALPHA: tl.constexpr):
    """Return the required margin of the classes y.

    If ALPHA is 0, ``alpha`` is a number. If ALPHA is 1, ``alpha`` points to one number. If ALPHA is 2, ``alpha`` points
    to one number per class. In this case, entries of y for which ``known`` is False get 0.
    """
    if ALPHA == 0:
        return tl.zeros((), tl.float32) + alpha
    elif ALPHA == 1:
        return tl.load(alpha).to(tl.float32)
    else:
        return tl.load(alpha + y, mask=known, other=0.0).to(tl.float32)


@triton.jit
def hinge(margin, alpha, tau, inverse_tau, inverse_tau_low, k: tl.constexpr):
    """Return the loss tau softplus((alpha - margin / k) / tau), and its derivative with respect to the margin.

    For more precision, 1 / tau is passed as two numbers in single precision: inverse_tau + inverse_tau_low.
    """
    zero = tl.full((), 0.0, tl.float64)
    violation = alpha - tl.full((), 1.0 / k, tl.float64) * margin
    z = violation * (zero + inverse_tau + inverse_tau_low)
    e = exp64(tl.minimum(tl.maximum(z, -120.0), 40.0))  # e^-120 is 0 in single precision
    log1p = tl.where(e < 1e-6, e * (1.0 - 0.5 * e), log64(1.0 + e))  # for small e, 1 + e would round e
    value = tl.where(z > 40.0, violation, tau * log1p)
    e, r = e.to(tl.float32), 1.0 / (1.0 + e.to(tl.float32))
    probability = e * r
    probability += r * (e - probability * (1.0 + e))  # corrects the rounding of the reciprocal and of the product
    return tl.where(z == z, value, z), (-1.0 / k) * tl.where(z == z, probability, z)


@triton.jit
def exp64(x):
    """Return e^x with a relative error of at most 5e-8, for x from -120 to 40.

    With x = m log 2 + f, the result is 2^m e^f. Only e^f - 1 is computed in single precision.
    """
    m = tl.floor(x.to(tl.float32) * 1.4426950408889634 + 0.5)
    f = (x - m.to(tl.float64) * 0.6931471805599453).to(tl.float32)
    series = 0.5 + f * (1 / 6 + f * (1 / 24 + f * (1 / 120 + f * (1 / 720 + f * (1 / 5040)))))
    rest = f + f * f * series
    power = ((m.to(tl.int32) + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)
    return (1.0 + rest.to(tl.float64)) * power


@triton.jit
def log64(x):
    """Return log x with a relative error of at most 2e-8, for a positive normal number x.

    With x = 2^e m, the result is e log 2 + 2 artanh((m - 1) / (m + 1)). The first term of the series of artanh is in
    double precision, and the other terms are in single precision.
    """
    bits = x.to(tl.int64, bitcast=True)
    e = (bits - 0x3FE6A09E667F3BCD) >> 52
    m = (bits - (e << 52)).to(tl.float64, bitcast=True)
    above, below = m - 1.0, m + 1.0
    r = 1.0 / below.to(tl.float32)
    y = (above.to(tl.float32) * r).to(tl.float64)
    y += r.to(tl.float64) * (above - y * below)
    z = y.to(tl.float32)
    z2 = z * z
    series = z * z2 * (2 / 3 + z2 * (2 / 5 + z2 * (2 / 7 + z2 * (2 / 9))))
    return e.to(tl.int32).to(tl.float64) * 0.6931471805599453 + (2.0 * y + series.to(tl.float64))
