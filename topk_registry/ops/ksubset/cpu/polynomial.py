"""Polynomials prod_i (q_i + p_i X) of several rows at once, in double precision, compiled by numba.

The last axis of every array has one entry per row, or two entries per row if a row needs two tilts. Such an entry is
called a *lane*. Vector instructions compute several lanes at once. ../README.md defines tilt, odds, top
group and tail.
"""

import numpy as np

from topk_registry.ops.cpu.numbers import borrowing, compiled, copy, exp64
from topk_registry.ops.ksubset.cpu.loops import FRONT


@borrowing
def top_group(members, size, u, P, powers, p, q, before, after):
    """For each lane, multiply the polynomial of the tail by the factors q + p X of the classes of the top group.

    A lane stands for a row of scores. The top group contains the classes of the row with the largest odds w. The factor
    of such a class has q = 1 / (1 + u w) and p = u w / (1 + u w). All other classes are the tail. The polynomial
    prod_i (1 + u w_i X) of the tail is computed from the power sums P_j = sum_i (u w_i)^j.

    Args:
        members: odds of the classes in the top groups [lanes, at least T].
        size: number of classes in the top group of each lane [lanes], at most T.
        u: number by which all odds of a lane are multiplied [lanes].
        P: power sums of the tails [k, lanes].
        powers: the power sums P_j with j > ``powers`` are 0.
        p, q: output, coefficients of the factors [T, lanes]. If a lane has fewer classes, its last factors are 1.
        before, after: output, products [T + 1, k + 1, lanes] as in :func:`products`. before[0] is the tail's
            polynomial.
    """
    T, width = p.shape
    for j in range(T):
        for i in range(width):
            odds = members[i, j] * u[i] if j < size[i] else 0.0
            q[j, i] = 1 / (1 + odds)
            p[j, i] = odds * q[j, i]
    tail_polynomial(P, powers, before[0])
    products(q, p, before, after)


@borrowing
def tail_polynomial(P, powers, b):
    """Write the coefficients b_0..b_k of prod_i (1 + w_i X), times one common factor.

    Newton's identities j b_j = sum_{i=1..j} (-1)^(i-1) b_{j-i} P_i give the coefficients from the power sums
    P_j = sum_i w_i^j. The common factor exp(-P_1 / 2) prevents overflow.

    Args:
        P: power sums [k, lanes], where P[j - 1] holds P_j. A lane stands for a row of scores.
        powers: the power sums P_j with j > ``powers`` are 0.
        b: output, coefficients [k + 1, lanes].
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
    """Write the products of the first i factors, and the products of all factors except the first i, for every i.

    Only the coefficients of degree 0 to k are computed. A lane stands for a row of scores, which has its own factors.

    Args:
        q, p: coefficients of the T factors q_i + p_i X [T, lanes].
        before: products [T + 1, k + 1, lanes]. The caller sets before[0]. The function sets before[i] to before[0]
            times the first i factors.
        after: output, products [T + 1, k + 1, lanes]. after[i] is the product of all factors except the first i.
    """
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
    """Write to ``e`` [lanes] the coefficient of X^degree in before[0] times all factors except factor ``left_out``.

    This product is before[left_out] times after[left_out + 1]. :func:`products` wrote ``before`` and ``after``.
    """
    e[:] = 0
    for j in range(degree + 1):
        for i in range(len(e)):
            e[i] += before[left_out, j, i] * after[left_out + 1, degree - j, i]


@borrowing
def label_gradient(p, q, before, after, g):
    """Write the gradient of the label's margin with respect to the scores of the top group.

    The margin of the label y is s_y + theta log(c_{k-1} / c_k) plus a constant. Here theta is the temperature, and c_j
    is the coefficient of X^j in the product of the factors of all classes except y. The gradient for class i is
    p_i (e_{k-2} / c_{k-1} - e_{k-1} / c_k), where e_j is the coefficient of X^j in the same product without class i.

    Args:
        p, q: coefficients of the factors q_i + p_i X [T, lanes]. The function overwrites q.
        before, after: products [T + 1, k + 1, lanes] that :func:`products` wrote. before[T] holds c.
        g: output, gradient [T, lanes].
    """
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
    """Write the balanced coefficients c_j / (c_k rho^(k-j)) of a polynomial c, and return rho = c_{k-1} / c_k.

    The balanced coefficients k - 1 and k are 1. Balanced coefficients up to 2^-70 are replaced by 0, because sums with
    them would give denormal numbers, which are slow.

    Args:
        products, T, lane: polynomials [., k + 1, lanes], and the indices of c: c_j is products[T, j, lane].
        out: output, memory of :func:`loops.coefficients`. The balanced coefficient j is written to out[FRONT + j].
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
    """Propagate the gradient of a loss backward through :func:`products` and :func:`without`.

    Args:
        q, p: coefficients of the factors q_i + p_i X [T, lanes].
        before, after: products [T + 1, k + 1, lanes] that :func:`products` wrote.
        g_below, g_last: gradients with respect to coefficients k - 1 and k of the products that omit one factor
            [T, lanes]. Row i of both arrays is for the product that omits factor i.
        g_product: gradient with respect to the product of all factors [k + 1, lanes]. The function replaces this
            gradient by the gradient with respect to before[0].
        g_x: output, gradient with respect to x_i [T, lanes], where p_i = sigmoid(x_i) and q_i = 1 - p_i.
    """
    T, k, lanes = len(p), before.shape[1] - 1, p.shape[1]
    g_q, g_p = np.zeros((T, lanes)), np.zeros((T, lanes))
    g_after, passed = np.zeros((k + 2, lanes)), np.zeros((k + 2, lanes))  # an additional 0 avoids a special case
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
def _through_factor(c, g, q, p, g_q, g_p, passed):  # the gradient of _times
    for j in range(len(c)):
        for i in range(len(q)):
            g_q[i] += g[j, i] * c[j, i]
            g_p[i] += g[j + 1, i] * c[j, i]
            passed[j, i] = q[i] * g[j, i] + p[i] * g[j + 1, i]


@borrowing
def _add_correlation(c, g_below, g_last, g):  # the gradient of a product with c, for coefficients k - 1 and k
    k = len(c) - 1
    for j in range(k + 1):
        for i in range(len(g_last)):
            g[j, i] += g_last[i] * c[k - j, i]
    for j in range(k):
        for i in range(len(g_last)):
            g[j, i] += g_below[i] * c[k - 1 - j, i]


@borrowing
def power_sum_cotangents(P, b, g):
    """Propagate the gradient of a loss backward from the coefficients b of :func:`tail_polynomial` to the power sums.

    The polynomial is b_0 exp(sum_i (-1)^(i-1) P_i X^i / i), so db_j / dP_i = (-1)^(i-1) b_{j-i} / i. The function
    treats b_0 as a constant, because b_0 cancels in the loss.

    Args:
        P: output, gradient with respect to the power sums [k, lanes].
        b: coefficients [k + 1, lanes].
        g: gradient with respect to b [k + 1, lanes].
    """
    k, lanes = len(P), P.shape[1]
    for power in range(1, k + 1):
        total, sign = P[power - 1], (1.0 if power % 2 else -1.0) / power
        total[:] = 0
        for j in range(power, k + 1):
            for i in range(lanes):
                total[i] += sign * g[j, i] * b[j - power, i]
