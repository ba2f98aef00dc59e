"""The k-subset operator in PyTorch operations.

The operator computes, for each class, the probability that a random set of k classes contains the class. The
probability of a set is proportional to exp((sum of the scores of the set) / temperature). README.md in this folder has
the formulas (5) to (13), to which comments refer.

Shapes depend only on the shapes of the arguments, and no branch depends on data. The dtype of the input is the dtype of
the computation. Therefore, ONNX export, ``torch.func`` transforms, ``torch.compile``, double precision and derivatives
of any order use the same code, for every k from 1 to n - 1.

A polynomial is a tensor [coefficients, B, classes], with the coefficient of the lowest degree first. The code avoids
the operator Sigmoid, because onnxruntime computes Sigmoid inaccurately far below zero. The code avoids MatMul, because
GPUs round the inputs of MatMul to TF32, and because quantizers convert MatMul to integers.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

SMALL_K = 64  # up to this k, the tilt of formula (5) prevents overflow, also in single precision
WITH_TAIL = 500  # up to this k, the coefficients of a tail do not overflow in double precision
MAX_GAP = 80.0  # larger odds than exp(80) give the same probabilities, and exp(80) is finite in single precision
HALVINGS = 20  # number of bisection steps for the tilt; the first interval has a length of about 2 log(2n)


def marginals(logits: Tensor, k: int, temperature: float = 1.0) -> Tensor:
    """For each class, return the probability that a random set of k classes contains the class: [B, n] -> [B, n].

    The probability of a set is proportional to exp((sum of the scores of the set) / temperature). If at most k scores
    of a row are above -inf, the classes with these scores get the probability 1, and all other classes get 0.

    Args:
        logits: scores [B, n], n > k. A class with the score -inf is excluded.
        k: number of classes in a set.
        temperature: number by which scores are divided.

    Example:
        >>> marginals(torch.zeros(1, 4), 2)
        tensor([[0.5000, 0.5000, 0.5000, 0.5000]])
    """
    # the sigmoid of margin / temperature: onnxruntime computes the operator Sigmoid inaccurately far below zero
    return (-F.softplus(-margins(logits, k, temperature) / temperature, threshold=40.0)).exp()


def margins(s: Tensor, k: int, theta: float) -> Tensor:
    """Return the margin theta log(p / (1 - p)) of each class: [B, n] -> [B, n].

    Here p is the probability that a random set of k classes contains the class, see :func:`marginals`. If at most k
    scores of a row are above -inf, the classes with these scores have the margin inf, and all other classes have the
    margin -inf.
    """
    n = s.shape[1]
    if 2 * k > n:
        certain = ((s != -torch.inf).sum(1, keepdim=True) <= k) & ~s.isnan().any(1, keepdim=True)
        out = -margins(-torch.where(certain, 0.0, s), n - k, theta)
        return torch.where(certain, torch.where(s == -torch.inf, s, s + torch.inf), out)
    top, where = s.detach().topk(min(n, _group_size(k + 1, n)), dim=-1)
    certain = (top[:, k : k + 1] == -torch.inf) & ~top[:, :1].isnan()  # topk puts NaN first
    usual = torch.where(certain, 0.0, s)
    top = usual.gather(1, where)
    if where.shape[1] == n:  # all classes are in the top group
        out = torch.zeros_like(s).scatter(1, where, top_margins(top, None, k, theta).margins)
    else:
        gap = usual - top[:, k : k + 1].detach()
        odds = (gap / theta).scatter(1, where, -torch.inf).exp()
        f = top_margins(top, power_sums(odds, k), k, theta)
        out = tail_margins(gap, odds * (-f.t).exp(), f.c, f.t, theta).scatter(1, where, f.margins)
    return torch.where(certain, torch.where(s == -torch.inf, s, s + torch.inf), out)


def log_odds(x: Tensor, k: int) -> Tensor:
    """Return the log-odds log(p / (1 - p)) of each class [B, n], where p is the result of ``marginals(x, k)``."""
    return margins(x, k, 1.0)


def _group_size(k: int, n: int) -> int:
    return min(n, 2 * k + 1) if k <= WITH_TAIL else n  # after the 2k largest classes, odds are below 1


class Margins(NamedTuple):
    """Margins of the top group, and the numbers from which :func:`tail_margins` computes all other margins."""

    a: Tensor  # [B, 1], reference score: the (k + 1)-th largest score
    t: Tensor  # [B, 1], the tilt: a constant, because the tilt cancels
    margins: Tensor  # [B, T], margins of the top group
    c: Tensor  # [k + 1, B, 1], coefficients of the product over all classes


def top_margins(top: Tensor, P: Tensor | None, k: int, theta: float) -> Margins:
    """Return the margins of the top group.

    Args:
        top: scores of the top group in descending order [B, T], at least k + 1 classes.
        P: power sums of the odds exp((s - a) / theta) of all other classes [B, k], where a is the (k + 1)-th largest
            score. None if there are no other classes.
        k, theta: as in :func:`margins`.
    """
    a = top[:, k : k + 1].detach()
    gap = top - a
    # for the k largest classes: without one of them, the (k + 1)-th class takes its place. At the tilt for other
    # classes, the ratio may be 0 / 0, and its gradient NaN.
    best, others = top_products(gap / theta, P, k, k + 1), top_products(gap / theta, P, k, k)
    below, last = torch.cat((best.outside[..., :k], others.outside[..., k:]), -1)
    tilts = torch.cat((best.t.expand(-1, k), others.t.expand(-1, top.shape[1] - k)), 1)
    return Margins(a, others.t, margins_from(below, last, gap, tilts, theta), others.c)


def tail_margins(gap: Tensor, w: Tensor, c: Tensor, t: Tensor, theta: float) -> Tensor:
    """Return the margins of classes of the tail with the scores a + ``gap`` and the odds w = exp(gap / theta - t).

    :func:`top_margins` returns a, the tilt t and the coefficients c.
    """
    below, last = divide_out(c, w, len(c) - 1)
    return margins_from(below, last, gap, t, theta)


def margins_from(below: Tensor, last: Tensor, gap: Tensor, t: Tensor, theta: float) -> Tensor:
    """Return the margins of classes with the scores a + ``gap``, by the end of formulas (8) and (9).

    For each class, ``below`` and ``last`` are the coefficients k - 1 and k of the product over all other classes, whose
    odds are exp((s - a) / theta - t).
    """
    return gap + theta * ((below / last).log() - t)


class Top(NamedTuple):
    """The factors 1 - p + p X of the classes of the top group, and their products with the polynomial of the tail."""

    t: Tensor  # [B, 1], the tilt, without a gradient
    p: Tensor  # [B, T], w / (1 + w) for the odds w of the top group
    outside: Tensor  # [count, B, T], the coefficients up to k of the product without each class of the top group
    c: Tensor  # [k + 1, B, 1], coefficients of the whole product


def top_products(x: Tensor, P: Tensor | None, k: int, balance: int, count: int = 2) -> Top:
    """Compute the polynomials for sets of k classes, at the tilt for sets of ``balance`` classes.

    Args:
        x: scores of the top group in descending order, minus a reference score and divided by the temperature [B, T].
        P: power sums of the odds of all other classes [B, k or more], relative to the same reference. None if there
            are no other classes.
        count: number of coefficients in ``outside``, the coefficients of degree k - count + 1 to k.
    """
    r = x[:, balance - 1 : balance].detach()
    mass = torch.zeros_like(r) if P is None else P[:, :1].detach() * (-r).exp()
    t = r + tilt(x.detach() - r, mass, balance)
    tail = torch.ones_like(t)[None] if P is None else from_power_sums(tilted(P[:, :k], -t))
    w = (x - t).clamp_max(MAX_GAP).exp()
    q = 1 / (1 + w)
    p = w * q
    levels = product_tree(torch.stack((q, p)), k)
    return Top(t, p, leave_one_out(levels, tail, k, count), product(levels[-1], tail, 0, 0, k))


def tilted(P: Tensor, shift: Tensor) -> Tensor:
    """Return the power sums P [B, k] of numbers that are all multiplied by exp(shift), for a shift [B, 1]."""
    j = torch.arange(1, P.shape[1] + 1, dtype=P.dtype, device=P.device)
    return torch.where(P == 0, P, P * (shift * j).exp())


def tilt(x: Tensor, mass: Tensor, k: int) -> Tensor:
    """Return a number t per row [B, 1]. The caller subtracts t from x, to prevent overflow of products of exp(x_i).

    Marginals and margins do not depend on t, except for rounding errors. Let R_m be the sum of exp(x_i) over all
    classes except the m largest. For k up to SMALL_K, t is the minimum of log(R_m / (k - m)) over m = 0..k-1, which is
    formula (5) of README.md in this folder. For larger k, t is the result of :func:`tilt_to_mean`.

    Args:
        x: the T largest scores in descending order, minus the k-th score and divided by the temperature [B, T].
        mass: sum of exp(x_i) over all other classes [B, 1].
        k: as in top-k.
    """
    if k > SMALL_K:
        return tilt_to_mean(x, mass, k)
    R = x.clamp_max(60.0).exp().flip(1).cumsum(1).flip(1)[:, :k] + mass  # R_0, ..., R_{k-1}
    return (R / torch.arange(k, 0, -1, dtype=x.dtype, device=x.device)).amin(1, keepdim=True).log()


def tilt_to_mean(x: Tensor, mass: Tensor, k: int | Tensor) -> Tensor:
    """Return the number t [B, 1] for which the sum of sigmoid(x_i - t) over all classes is about k - 1/2, by bisection.

    As in :func:`tilt`, the caller subtracts t from x to prevent overflow. Let p_i = sigmoid(x_i - t). The caller needs
    the coefficients k - 1 and k of the polynomial prod_i (1 - p_i + p_i X). With this t, one of these two coefficients
    is the largest coefficient of the polynomial, so neither of them underflows.

    Args:
        x: scores of T classes, minus the k-th largest score and divided by the temperature [B, T].
        mass: sum of exp(x_i) over classes that are not in x [B, 1]. These classes add mass * exp(-t) to the sum.
        k: as in top-k, an integer or one number per row [B, 1].
    """
    size = torch.as_tensor(k, dtype=x.dtype, device=x.device)
    reach = (2.0 * size + x.shape[1] + mass).log() + math.log(2)  # t is between -reach and reach
    t = torch.zeros_like(x[:, :1])
    for step in range(HALVINGS):
        w = (x - t).clamp_max(MAX_GAP).exp()
        drawn = (w / (1 + w)).sum(1, keepdim=True) + mass * (-t).exp()
        t = t + reach * 0.5 ** (step + 1) * (drawn - (size - 0.5)).sign()
    return t


def power_sums(w: Tensor, k: int) -> Tensor:
    """Return the power sums P_j = sum_i w_i^j of the numbers w >= 0, for j = 1..k: [B, n] -> [B, k].

    For j >= 2, powers of small w_i are replaced by 0, because they could be denormal numbers, which are slow. Every
    power that is replaced is at most 2^-50, or 2^-120 in double precision.
    """
    w = _blocks(w)  # [B, blocks, length]
    sums, power, base, reach = [w.sum(-1, keepdim=True)], w, w, 1.0
    bits, span = (120.0, 1000.0) if w.dtype == torch.float64 else (50.0, 120.0)
    for j in range(2, k + 1):
        if j > reach:
            bound, reach = 2.0 ** (-bits / j), span * j / bits
            base = F.threshold(w, bound, 0.0)  # several times faster than torch.where
            power = base if j == 2 else power
        power = power * base
        sums.append(power.sum(-1, keepdim=True))
    return torch.cat(sums, -1).sum(1)


def _blocks(w: Tensor) -> Tensor:
    # w [B, n] as [B, blocks, length], padded with zeros: two short sums have smaller rounding errors than one long sum.
    # onnxruntime adds the numbers of a row in order. For 20,000 equal numbers, 1.5 decimal digits would be lost.
    n = w.shape[1]
    length = 1 << math.isqrt(n).bit_length()
    blocks = -(-n // length)
    return F.pad(w, (0, blocks * length - n)).unflatten(1, (blocks, length))


def from_power_sums(P: Tensor) -> Tensor:
    """Return the coefficients 0..k of prod_i (1 + w_i X), by Newton's identities: [B, k] -> [k + 1, B, 1].

    The argument contains the power sums P_j = sum_i w_i^j for j = 1..k. For k above SMALL_K, all coefficients are
    multiplied by exp(-P_1 / 2), which prevents overflow.
    """
    k = P.shape[1]
    signed = P * torch.tensor([(-1.0) ** i for i in range(k)], dtype=P.dtype, device=P.device)
    b = torch.ones_like(P[:, :1]) if k <= SMALL_K else (-0.5 * P[:, :1]).exp()  # b_{j-1}, ..., b_0
    for j in range(1, k + 1):
        b = torch.cat(((b * signed[:, :j]).sum(-1, keepdim=True) / j, b), -1)
    return b.flip(-1).t().unsqueeze(-1)


def product_tree(factors: Tensor, k: int) -> list[Tensor]:
    """Multiply T factors q + p X [2, B, T] pairwise in a binary tree, and return all levels of the tree.

    The first level contains the factors, and the last level contains the product of all factors. A level has the shape
    [coefficients, B, nodes]. In a level with h nodes, node i is the product of the nodes i and h + i of the level
    before. If node h + i does not exist, node i is copied. Coefficients above degree k are omitted.
    """
    levels = [factors]
    while levels[-1].shape[-1] > 1:
        left, right = _halves(levels[-1])
        levels.append(product(left, right, 0, 0, min(k, 2 * len(left) - 2)))
    return levels


def leave_one_out(levels: list[Tensor], start: Tensor, k: int, count: int) -> Tensor:
    """For each of T factors, multiply all other factors. Return the coefficients k - count + 1 to k of each product.

    Args:
        levels: result of :func:`product_tree` for the factors.
        start: polynomial by which every product is multiplied [m, B, 1].
        k: highest degree.
        count: number of coefficients per product. The lowest degree, k - count + 1, may be negative.

    Returns:
        Tensor [count, B, T]. Coefficients of a negative degree are 0.
    """
    # The product outside of a node is the product outside of its parent, times the sibling of the node.
    needed = [max(0, k + 1 - count)]  # lowest degree that each level needs
    for level in levels[:-1]:
        needed.append(max(0, needed[-1] - len(level) + 1))
    outside, first = start, 0
    for level, low in zip(reversed(levels[:-1]), reversed(needed[:-1]), strict=True):
        left, right = _halves(level)
        sibling, parent = torch.cat((right, left), -1), torch.cat((outside, outside), -1)
        outside, first = product(sibling, parent, first, low, k)[..., : level.shape[-1]], low
    if len(levels) == 1:
        outside = product(start, torch.ones_like(levels[0][:1]), 0, needed[0], k)
    return F.pad(outside, (0, 0, 0, 0, count - len(outside), 0))


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    if x.shape[-1] % 2:
        x = torch.cat((F.pad(x[:1], (0, 1), value=1.0), F.pad(x[1:], (0, 1))))
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def product(a: Tensor, b: Tensor, first: int, low: int, high: int) -> Tensor:
    """Return the coefficients of degree ``low`` to ``high`` of the product of two polynomials.

    Args:
        a: coefficients of the first polynomial [., B, classes], from degree 0 on.
        b: coefficients of the second polynomial [., B, classes], from degree ``first`` on.
    """
    if len(a) > len(b) and first == 0:
        a, b = b, a
    if len(a) * (high - low + 1) > 4096:  # a loop over a needs less memory
        b = F.pad(b, (0, 0, 0, 0, max(0, len(a) - 1 + first - low), max(0, high + 1 - first - len(b))))
        origin = max(0, len(a) - 1 + first - low) - first
        return sum(a[i] * b[origin + low - i : origin + high + 1 - i] for i in range(len(a)))  # pyright: ignore[reportReturnType]
    index = [[j - i - first for i in range(len(a))] for j in range(low, high + 1)]
    if index[0][-1] < 0 or index[-1][0] >= len(b):
        zero = len(b)
        index = [[i if 0 <= i < zero else zero for i in row] for row in index]
        b = F.pad(b, (0, 0, 0, 0, 0, 1))
    return (a * b[torch.tensor(index, device=b.device)]).sum(1)


def divide_out(c: Tensor, w: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """For each class i, divide the polynomial c by 1 + w_i X, and return the coefficients k - 1 and k of the quotient.

    The polynomial c is [k + 1, B, 1], the odds w are [B, n], and both results are [B, n]. The quotient has the
    coefficients d_0 = c_0 and d_j = c_j - w_i d_{j-1}. For w_i < 1, each step reduces the rounding error of d_{j-1}.
    """
    d = c[0]
    for j in range(1, k):
        d = torch.addcmul(c[j], w, d, value=-1)
    return d, torch.addcmul(c[k], w, d, value=-1)


def invertible(temperature: float, dtype: torch.dtype) -> float:
    """Return ``temperature``, but at least a tiny number whose reciprocal is finite in ``dtype``.

    At this tiny temperature, smoothed margins and hinges are already equal to their limits for temperature 0.
    """
    return max(temperature, 4 * torch.finfo(dtype).tiny)


def soft_hinge(violation: Tensor, tau: float) -> Tensor:
    """Return the smoothed hinge tau softplus(v / tau) of violations v. For tau near 0, this is about max(v, 0).

    Example:
        >>> soft_hinge(torch.tensor([-1.0, 0.0, 1.0]), 0.1)
        tensor([4.5399e-06, 6.9315e-02, 1.0000e+00])
    """
    return F.softplus(violation, beta=1 / invertible(tau, violation.dtype), threshold=40.0)
