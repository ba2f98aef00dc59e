"""Polynomials of several rows at once, in double precision.

The last axis of every array has one lane per row, for vector instructions. The tilt t is stored as u = exp(-t).
"""

from topk_registry.ops.cpu.memory import zeros
from topk_registry.ops.cpu.numbers import borrowing, compiled, copy, exp64
from topk_registry.ops.ksubset.passes import FRONT


@borrowing
def top_group(members, size, u, P, powers, p, q, before, after):
    """Multiply the polynomial of the tail by the factors q + p X of the top group, per lane.

    Args:
        members: odds of the top groups [lanes, .].
        size: number of odds per lane, at most T = len(p).
        u: factor of the tilt per lane.
        P: power sums of the tails [k, lanes], overwritten with the power sums of the tilted odds.
        powers: number of power sums that are not 0.
        p, q: the factors [T, lanes], written. Lanes with fewer factors have additional factors of 1.
        before, after: see :func:`products` [T + 1, k + 1, lanes], written.
    """
    T, width = p.shape
    for i in range(width):
        factor = 1.0
        for j in range(powers):
            factor *= u[i]
            P[j, i] *= factor
    for j in range(T):
        for i in range(width):
            odds = members[i, j] * u[i] if j < size[i] else 0.0
            q[j, i] = 1 / (1 + odds)
            p[j, i] = odds * q[j, i]
    tail_polynomial(P, powers, before[0])
    products(q, p, before, after)


@borrowing
def tail_polynomial(P, powers, b):
    """Write b_0..b_k of prod (1 + w_i X) from power sums P[j - 1] = sum w_i^j, by Newton's identities.

    The coefficients are scaled by exp(-P_1 / 2). This factor is between the first and the largest coefficient.
    """
    for i in range(b.shape[1]):
        b[0, i] = exp64(-0.5 * min(P[0, i], 1200.0))
    for j in range(1, len(b)):
        total = b[j]
        total[:] = 0
        for power in range(1, min(j, powers) + 1):
            sign = (1.0 if power % 2 else -1.0) / j
            for i in range(len(total)):
                total[i] += sign * b[j - power, i] * P[power - 1, i]


@borrowing
def products(q, p, before, after):
    """Write before[i], which is before[0] times the first i factors, and after[i], the product of factors from i on."""
    T = len(p)
    after[T] = 0
    after[T, 0] = 1
    for i in range(T):
        _times(before[i], q[i], p[i], before[i + 1])
        h = T - 1 - i
        _times(after[h + 1], q[h], p[h], after[h])


@borrowing
def _times(c, q, p, out):
    for i in range(len(q)):
        out[0, i] = q[i] * c[0, i]
    for j in range(1, len(c)):
        for i in range(len(q)):
            out[j, i] = q[i] * c[j, i] + p[i] * c[j - 1, i]


@borrowing
def without(before, after, left_out, degree, e):
    """Write the coefficient of this degree of the product without one factor."""
    e[:] = 0
    for j in range(degree + 1):
        for i in range(len(e)):
            e[i] += before[left_out, j, i] * after[left_out + 1, degree - j, i]


@borrowing
def label_gradient(p, q, before, after, g):
    """Write g[i] = p_i (e_{k-2} / c_{k-1} - e_{k-1} / c_k), with e the product without factor i. Overwrite q."""
    (T, width), k = p.shape, before.shape[1] - 1
    for j in range(T):
        below, two_below = g[j], q[j]
        without(before, after, j, k - 1, below)
        two_below[:] = 0
        if k > 1:
            without(before, after, j, k - 2, two_below)
        for i in range(width):
            g[j, i] = p[j, i] * (two_below[i] / before[T, k - 1, i] - below[i] / before[T, k, i])


@borrowing
def balanced(products, T, lane, out):
    """Return rho = c_{k-1} / c_k of one lane of products[T], and write its coefficients tilted by log rho and scaled.

    The last two coefficients are then 1. Tiny coefficients become 0, because Horner's rule would give denormal numbers.
    ``out`` is memory from :func:`passes.coefficients`.
    """
    k = products.shape[1] - 1
    rho = products[T, k - 1, lane] / products[T, k, lane]
    scale, back = 1 / products[T, k, lane], 1 / rho
    for j in range(k, -1, -1):
        scaled = products[T, j, lane] * scale
        out[FRONT + j] = scaled if scaled > 2.0**-70 else 0.0
        scale *= back
    return rho


@compiled
def cotangents(q, p, before, after, g_below, g_last, g_product, g_x):
    """Compute the backward pass of :func:`products` and :func:`without`.

    Args:
        q, p, before, after: factors and results of ``products``.
        g_below, g_last: cotangents of coefficients k - 1 and k of the product without each factor.
        g_product: cotangents of the whole product, overwritten with the cotangents of before[0].
        g_x: output, cotangents of x, where p = sigmoid(x).
    """
    T, k, lanes = len(p), before.shape[1] - 1, p.shape[1]
    g_q, g_p = zeros((T, lanes)), zeros((T, lanes))
    g_after, passed = zeros((k + 2, lanes)), zeros((k + 2, lanes))  # an additional 0 avoids a special case
    _add_correlation(before[0], g_below[0], g_last[0], g_after)
    for j in range(1, T):
        _through_factor(after[j + 1], g_after, q[j], p[j], g_q[j], g_p[j], passed)
        _add_correlation(before[j], g_below[j], g_last[j], passed)
        g_after, passed = passed, g_after
    g_before = g_after
    for j in range(k + 1):
        copy(g_product[j], g_before[j])
    for j in range(T - 1, -1, -1):
        _through_factor(before[j], g_before, q[j], p[j], g_q[j], g_p[j], passed)
        _add_correlation(after[j + 1], g_below[j], g_last[j], passed)
        g_before, passed = passed, g_before
        for i in range(lanes):
            g_x[j, i] = p[j, i] * q[j, i] * (g_p[j, i] - g_q[j, i])
    for j in range(k + 1):
        copy(g_before[j], g_product[j])


@borrowing
def _through_factor(c, g, q, p, g_q, g_p, passed):
    """Compute the backward pass of :func:`_times`. Overwrite ``passed`` with the cotangents of c."""
    for j in range(len(c)):
        for i in range(len(q)):
            g_q[i] += g[j, i] * c[j, i]
            g_p[i] += g[j + 1, i] * c[j, i]
            passed[j, i] = q[i] * g[j, i] + p[i] * g[j + 1, i]


@borrowing
def _add_correlation(c, g_below, g_last, g):
    """Compute the backward pass of :func:`without` for one of the two products. The other product is c."""
    k = len(c) - 1
    for j in range(k + 1):
        for i in range(len(g_last)):
            g[j, i] += g_last[i] * c[k - j, i]
    for j in range(k):
        for i in range(len(g_last)):
            g[j, i] += g_below[i] * c[k - 1 - j, i]


@borrowing
def power_sum_cotangents(P, b, g):
    """Compute the backward pass of :func:`tail_polynomial` with constant b_0. P gets the power sums' cotangents.

    From b = exp(sum_i (-1)^(i-1) P_i X^i / i) follows db_j / dP_i = (-1)^(i-1) b_{j-i} / i.
    """
    k, lanes = len(P), P.shape[1]
    for power in range(1, k + 1):
        total, sign = P[power - 1], (1.0 if power % 2 else -1.0) / power
        total[:] = 0
        for j in range(power, k + 1):
            for i in range(lanes):
                total[i] += sign * g[j, i] * b[j - power, i]
