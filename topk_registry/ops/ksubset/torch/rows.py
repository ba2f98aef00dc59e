"""Compute the operator in torch operations, on odds in place of logarithms, in the precision of the scores.

Memory grows with n and with k^2, not with n k.

With x = s / theta and odds w_i = exp(x_i - t), the tilt t cancels from every ratio of neighbouring sigmas. It is
chosen so that drawing each class by itself with chance p = w / (1 + w) gives between k/2 and k classes on average:
coefficients around degree k are then neither huge nor tiny, and at most 2k classes have w >= 1. The largest classes,
the top group, enter by products of q + p X and are left out again without division (polynomial.leave_one_out). The
rest, the tail, enters by its power sums, for which w < 1 keeps Newton's identities stable, and is left out by Horner's
rule, stable for the same reason. For large k there is no tail, and the tilt is chosen more closely (tilt_to_mean).

Leaving out one of the k largest classes moves the balance to the class after them, which may lie far below: for those
the tilt is chosen with k + 1 in the place of k.

Instead of the log-odds l these functions give margins, theta * l(s / theta): where theta goes to zero l overflows, but
the margin becomes s_i - (the k-th largest of the other scores).
"""

import math
import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from topk_registry.ops.ksubset.torch.polynomial import from_power_sums, leave_one_out, multiply, product_tree

BLOCK = 1 << 16  # scores in a block of rows: few enough to stay in a core's cache from one pass to the next
BLOCK_ON_GPU = 1 << 24
WITH_TAIL = 1000  # up to this k a tail's coefficients stay within the range of double precision
HALVINGS = 30  # of a range of 2 log 2n, where the mean's slope is n / 4 at most: leaves n / 10^8 of a class
LONG = 200  # with this many scores for each of the m largest, it pays to look for them in groups


def top_group_size(k: int) -> int:
    """Return 2k + 1, which holds every class with odds of 1 or more, and one more.

    Beyond WITH_TAIL all classes are in the top group, and there is no tail: slower, still exact.
    """
    return 2 * k + 1 if k <= WITH_TAIL else sys.maxsize - 1


def row_blocks(s: Tensor, numbers: int = 0) -> Iterator[slice]:
    """Slice the rows into blocks that fit into a core's cache on the CPU, or that keep a GPU busy.

    ``numbers`` is how many numbers the work on a row holds, if they are more than its scores.
    """
    step = max(1, (BLOCK if s.device.type == "cpu" else BLOCK_ON_GPU) // max(s.shape[1], numbers))
    for start in range(0, max(1, s.shape[0]), step):
        yield slice(start, start + step)


def tail_odds(s: Tensor, a: Tensor, outside_tail: Tensor | None, theta: float, out: Tensor) -> Tensor:
    """exp((s - a) / theta) of the tail, 0 for the classes outside it: [B, n], [B], [B, .] -> [B, n].

    Odds too small to change anything are zero too: products of them would be denormal numbers, which are slow.
    """
    floor = 0.4 * math.log(torch.finfo(s.dtype).tiny)
    u = torch.sub(s, a[:, None], out=out)
    if outside_tail is not None:
        u.scatter_(1, outside_tail, -torch.inf)
    u.mul_(1 / theta)
    # not exp(-inf): vectorised exponentials leave their fast path for arguments out of range
    return torch.threshold_(u.clamp_(min=floor).exp_(), 1.01 * math.exp(floor), 0.0)


def power_sums(w: Tensor, k: int) -> Tensor:
    """P_j = sum_i w_i^j, j = 1..k: [B, n] -> [k, B].

    The powers of small odds would run into denormal numbers, so odds below a bound are left out: below 2^-25 in single
    precision from the second power on (n such squares change the sum by n 2^-50), and below a higher one each time the
    powers have used up the range of the exponent. Raised to the bound instead, they would outweigh coefficients of a
    large k: k equal scores far above all others leave 2^-k for the one of degree k.
    """
    sums, v, base, reach = [w.sum(-1)], w, w, 1.0
    bits, span = (50.0, 120.0) if w.dtype == torch.float32 else (120.0, 1000.0)
    for j in range(2, k + 1):
        if j > reach:
            bound, reach = 2.0 ** (-bits / j), span * j / bits
            base = torch.threshold(w, bound, 0.0)
            v = base if j == 2 else v
        v = torch.mul(v, base, out=None if v is base else v)
        sums.append(v.sum(-1))
    return torch.stack(sums)


def tilt(x: Tensor, mass: Tensor, k: int) -> Tensor:
    """t [B], from the top group's x [T, B], largest first and relative to the k-th, and the sum of the tail's odds [B].

    t = min over m < k of log(R_m / (k - m)), R_m the sum of exp(x) outside the m largest. It needs no precision, so x
    far above the k-th may be capped. But where k/2 are drawn on average, the chance of exactly k may be 2^-k, which
    double precision holds to k = 1074: for large k the closer :func:`tilt_to_mean` serves, which takes more steps.
    """
    if k > WITH_TAIL:
        return tilt_to_mean(x, k)
    m = x.shape[0] - k + 1
    e = x.clamp(max=60.0).exp().flip(0)
    R = torch.cat((mass + e[:m].sum(0, keepdim=True), e[m:])).cumsum(0)  # [k, B]: R_{k-1}, ..., R_0
    return (R / torch.arange(1, k + 1, dtype=x.dtype, device=x.device)[:, None]).amin(0).log()


def tilt_to_mean(x: Tensor, k: int | Tensor) -> Tensor:
    """t [B] with which k - 1/2 of all classes are drawn on average, from x [n, B] relative to the k-th largest.

    The most probable number is then k - 1 or k, or both, and its chance is at least 1 / (n + 1). Below t = -log 2k the
    k largest alone would be too many. Above log 2n all from the k-th on would not add 1/2 to those before it.
    """
    size = torch.as_tensor(k, dtype=x.dtype, device=x.device)
    low = (-(2 * size).log()).expand(x.shape[1:])
    high = torch.full_like(low, math.log(2 * x.shape[0]))
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        more = torch.sigmoid(x - middle).sum(0) > size - 0.5
        low, high = torch.where(more, middle, low), torch.where(more, high, middle)
    return high


def polynomials(x: Tensor, P: Tensor | None, k: int, depth: int) -> tuple[Tensor, Tensor]:
    """Return coefficients 0..k of a row's polynomial, and k-depth..k without each class of the top group.

    From the top group's x [T, B] and the tail's power sums [k, B], both tilted: [k+1, B] and [T, depth+1, B]. P is None
    where there is no tail. All coefficients of a row share a factor that is left open, as it cancels from their ratios.
    """
    T = 1 << (x.shape[0] - 1).bit_length()
    filled = torch.cat((x, x.new_full((T - x.shape[0], x.shape[1]), -torch.inf)))
    factors = torch.stack((torch.sigmoid(-filled), torch.sigmoid(filled)), 1)
    if P is None:
        levels = product_tree(factors, k)
        return levels[-1][0][: k + 1], leave_one_out(levels, x.new_ones(1, x.shape[1]), k, depth)[: x.shape[0]]
    # the coefficient of degree k may be 2^-k, where numbers may be flushed to zero: half of that goes into the factors
    scale = factors.detach().amax(1, keepdim=True).rsqrt()
    levels = product_tree(factors * scale, k)
    b = from_power_sums(P, (-0.5 * P[0]).exp())  # scaled halfway between its first and its largest coefficient
    return multiply(b, levels[-1][0], 0, k), (leave_one_out(levels, b, k, depth) * scale)[: x.shape[0]]


def balanced(c: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The tilt log rho [B] that makes coefficients k-1 and k equal, rho = c_{k-1} / c_k, and c so tilted, c_k = 1.

    There k - 1/2 classes are drawn on average, so that the tail's odds, times rho, are still below 1.
    """
    log_rho = (c[k - 1] / c[k]).log().detach()
    j = torch.arange(k + 1, dtype=c.dtype, device=c.device)[:, None]
    # low coefficients of a large k may be 0, and must not meet inf; none that matters is raised so far
    c = c / c[k].detach() * torch.exp((log_rho * (j - k)).clamp(max=80.0))
    # zero, as coefficients too small to matter would make denormal numbers in Horner's rule, which are slow
    return log_rho, torch.where(c < 2.0**-70, 0.0, c)


def tilted(P: Tensor, shift: Tensor) -> Tensor:
    """Power sums [k, B] of odds multiplied by exp(shift) [B]."""
    j = torch.arange(1, P.shape[0] + 1, dtype=P.dtype, device=P.device)[:, None]
    return P * torch.exp(shift * j)


def horner(w: Tensor, c: Tensor) -> Tensor:
    """The last coefficient of c / (1 + w X), one quotient for every w: [B, n], [degree+1, B] -> [B, n].

    d_j = c_j - w d_{j-1}: with w < 1 errors shrink from step to step.
    """
    d = c[0][:, None].expand_as(w).clone()
    for c_j in c[1:]:
        torch.sub(c_j[:, None], d.mul_(w), out=d)
    return d


class State(NamedTuple):
    """Summary of the classes of a row: their largest scores, and the power sums of all others' odds.

    These are O(k) numbers a row, whatever the number of classes; states of disjoint classes merge (torch/state.py).
    Odds are exp((s - a) / theta) for the reference a = :func:`reference` of the largest scores.
    """

    top: Tensor  # [B, T], largest first
    classes: Tensor  # [B, T], the classes with these scores
    P: Tensor  # [k, B]


def reference(top: Tensor, k: int) -> Tensor:
    """Return the k-th largest score [B]; of fewer scores, the least finite number, as there is no tail then."""
    least = torch.finfo(top.dtype).min
    return top[:, k - 1].clamp(min=least) if top.shape[1] >= k else top.new_full((len(top),), least)


def largest(s: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """Return the m largest scores and their places [B, m], largest first: [B, n] -> [B, m], [B, m].

    Long rows are divided into n / g groups of g scores. The m groups with the largest maxima hold the m largest scores,
    so only these are searched. A group is every (n / g)-th score, so that maxima are taken of whole vectors.
    """
    n = s.shape[1]
    if n < LONG * m or s.device.type != "cpu":
        return s.topk(m)
    g = math.isqrt(n // m)
    step = n // g
    groups = s[:, : g * step].unflatten(1, (g, step)).amax(1).topk(m).indices
    members = (groups[:, None] + step * torch.arange(g)[:, None]).flatten(1)
    places = torch.cat((members, torch.arange(g * step, n).expand(len(s), -1)), 1)
    top, where = s.gather(1, places).topk(m)
    return top, places.gather(1, where)


def summarise(
    s: Tensor, k: int, theta: float, first_class: int = 0, label: Tensor | None = None, out: Tensor | None = None,
    size: int | None = None,
) -> State:  # fmt: skip
    """Return the state of classes first_class, first_class + 1, ... from their scores s [B, n].

    A ``label`` [B] is left out of it. The odds are written into ``out`` [B, n], which may be s itself; they are 0
    outside the tail. ``size`` is that of the top group, at least k and 2, or :func:`top_group_size`.
    """
    n, w = s.shape[1], torch.empty_like(s) if out is None else out
    size = size or top_group_size(k)
    if label is None:
        top, classes = largest(s, min(size, n))
        outside_tail = classes
    else:
        top, classes = largest(s, min(size + 1, n))
        kept = torch.arange(top.shape[1] - 1, device=s.device) + (classes == label[:, None]).cumsum(-1)[:, :-1]
        top, classes = top.gather(1, kept), classes.gather(1, kept)  # without the label, or else without the last
        outside_tail = torch.cat((classes, label[:, None]), 1)
    a, P = reference(top, k), []
    for rows in row_blocks(s):
        tail_odds(s[rows], a[rows], outside_tail[rows], theta, out=w[rows])
        P.append(power_sums(w[rows], k) if k <= WITH_TAIL else w.new_zeros(k, len(w[rows])))
    return State(top, classes + first_class if first_class else classes, torch.cat(P, 1))


class Coefficients(NamedTuple):
    """Result of :func:`finish`: the margin of a class outside the state, and the gradient to the classes inside.

    The margin of a class of score s is (s - a) + shift.
    """

    a: Tensor  # [B]
    shift: Tensor  # [B], double precision
    scale: Tensor  # [B], factor from odds relative to a to the odds that c is balanced for
    c: Tensor  # [k+1, B], with c_{k-1} = c_k = 1
    classes: Tensor  # [B, T], the top group
    in_top: Tensor  # [B, T], its gradient


def finish(state: State, theta: float) -> Coefficients:
    """Coefficients of the product over all classes of a state."""
    k, a = len(state.P), state.top[:, state.P.shape[0] - 1]
    x = (state.top.to(state.P.dtype) - a[:, None]).T / theta
    t = tilt(x, state.P[0], k)
    x, P = x - t, tilted(state.P, -t) if k <= WITH_TAIL else None
    c, e = polynomials(x, P, k, depth=2)
    log_rho, balanced_c = balanced(c, k)
    shift = (c[k - 1].double() / c[k].double()).log() - t.double()
    in_top = torch.sigmoid(x) * (e[:, 0] / c[k - 1] - e[:, 1] / c[k])  # [T, B]
    return Coefficients(a, theta * shift, torch.exp(log_rho - t).to(a), balanced_c.to(a), state.classes, in_top.T.to(a))


def tail_gradient(w: Tensor, f: Coefficients) -> Tensor:
    """Replace the tail's odds w [B, n] by the gradient of the margin with respect to the tail's scores."""
    k = len(f.c) - 1
    if k > WITH_TAIL:  # no class is in the tail
        return w
    for rows in row_blocks(w):
        v = w[rows].mul_(f.scale[rows, None])
        if k > 1:  # d_{k-2} - d_{k-1} = d_{k-2} (1 + v) - 1
            d = horner(v, f.c[: k - 1, rows])
            torch.mul(d.addcmul_(d, v).sub_(1.0), v, out=v)
        else:
            v.neg_()
    return w
