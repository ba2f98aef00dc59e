"""The k-subset operator in PyTorch operations: formulas (5) to (13) of README.md.

Every function has static shapes, no data-dependent branch, and computes in the dtype of its input. Hence the same code
is used for ONNX export, ``torch.func`` transforms, ``torch.compile``, double precision, derivatives of any order, and
every k from 1 to n - 1.

Functions for all classes of a row:

- ``marginals(logits [B, n], k, temperature=1.0) -> [B, n]``: used by export. If a row has at most k finite scores,
  their classes get 1 and all others get 0.
- ``margins(s [B, n], k, theta) -> [B, n]``: theta times the log-odds of s / theta.
- ``log_odds(x [B, n], k) -> [B, n]``.
- ``tilt``, ``tilt_to_mean``, ``power_sums``, ``from_power_sums``, ``product_tree``, ``leave_one_out``, ``divide_out``:
  steps of the computation.

Functions for classes in chunks or on several ranks (2k <= n, no gradients recorded):

- ``summarize(s [B, m], k, theta, first_class=0) -> State``, ``merge(states, theta) -> State``, and
  ``finish(state, theta) -> Coefficients``.
- ``label_gradient(s [B, m], f, theta, first_class=0) -> [B, m]`` from the Coefficients of all classes but the label.
- ``chunk_margins(s [B, m], f, theta) -> [B, m]`` of tail classes; ``top_margins(state for k + 1, theta) -> [B, k]``.

Polynomials are tensors [coefficients, B, classes], lowest degree first. The graph contains no Sigmoid, because
onnxruntime's is wrong far below zero, and no MatMul, because GPUs round its inputs to TF32 and quantizers replace it.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

SMALL_K = 64  # up to this k, the tilt of formula (5) is precise enough, in single precision too
WITH_TAIL = 500  # up to this k, the coefficients of a tail do not overflow in double precision
MAX_GAP = 80.0  # odds above exp(80) give the same probabilities; exp(80) is finite in single precision
HALVINGS = 20  # bisection steps of an interval of about 2 log(2n) that contains the tilt


def marginals(logits: Tensor, k: int, temperature: float = 1.0) -> Tensor:
    """Return the probability that each class is in a random set of k classes.

    Args:
        logits: scores [B, n], n > k; -inf excludes a class.
        k: size of the set.
        temperature: number by which scores are divided.

    Example:
        >>> marginals(torch.zeros(1, 4), 2)
        tensor([[0.5000, 0.5000, 0.5000, 0.5000]])
    """
    n = logits.shape[1]
    top, where = logits.topk(min(k + 1, n) if 2 * k > n else _group_size(k, n), dim=-1)
    certain = top[:, k : k + 1] == -torch.inf  # at most k finite scores: only one set is possible
    usual, top = torch.where(certain, 0.0, logits), torch.where(certain, 0.0, top)
    if 2 * k > n:
        inside = _probabilities(-usual, *(-usual).topk(_group_size(n - k, n), dim=-1), n - k, temperature, 1)
        inside = torch.where(logits == -torch.inf, 0.0, inside)
    else:
        inside = _probabilities(usual, top, where, k, temperature, 0)
    of_certain = torch.where(logits == -torch.inf, 0.0, 1.0 + (logits - logits))  # NaN for inf and NaN
    return torch.where(certain, of_certain, inside)


def margins(s: Tensor, k: int, theta: float) -> Tensor:
    """Return the margins theta l(s / theta) of every class: [B, n] -> [B, n].

    The margins of the k largest classes are computed with the tilt for k + 1 classes. The reason is that without one of
    the k largest classes, the (k + 1)-th class takes its place. If at most k scores are finite, the margins of these
    scores are inf.
    """
    n = s.shape[1]
    if 2 * k > n:
        certain = ((s != -torch.inf).sum(1, keepdim=True) <= k) & ~s.isnan().any(1, keepdim=True)
        out = -margins(-torch.where(certain, 0.0, s), n - k, theta)
        return torch.where(certain, torch.where(s == -torch.inf, s, s + torch.inf), out)
    top, where = s.detach().topk(min(n, _group_size(k + 1, n)), dim=-1)
    certain = (top[:, k : k + 1] == -torch.inf) & ~top[:, :1].isnan()  # topk puts NaN first
    usual, top = torch.where(certain, 0.0, s), torch.where(certain, 0.0, top)
    group = usual.gather(1, where)
    of_next = _solve(usual, top, group, where, k, k + 1, theta)
    of_kth = _solve(usual, top, group, where, k, k, theta, of_next)
    of_best = _group_margins(group, of_next, theta, slice(0, k))
    in_top = torch.cat((of_best, _group_margins(group, of_kth, theta, slice(k, None))), 1)
    if of_kth.tail is None:
        out = torch.zeros_like(s).scatter(1, where, in_top)
    else:
        below, last = divide_out(of_kth.c, of_kth.tail, k)
        out = (usual - of_kth.a) + theta * ((below / last).log() - of_kth.t)
        out = out.scatter(1, where, in_top)
    return torch.where(certain, torch.where(s == -torch.inf, s, s + torch.inf), out)


def log_odds(x: Tensor, k: int) -> Tensor:
    """Return the log-odds that each class is in a random set of k classes: [B, n] -> [B, n]."""
    return margins(x, k, 1.0)


class _Solution(NamedTuple):
    a: Tensor  # [B, 1], reference score
    t: Tensor  # [B, 1], the tilt
    mass: Tensor  # [B, 1], sum of the tail's odds before the tilt
    tail: Tensor | None  # [B, n], odds; 0 at the top group
    P: Tensor | None  # [B, k], power sums of the tail
    p: Tensor  # [B, T], of the top group
    q: Tensor  # [B, T], 1 - p
    outside: Tensor  # [2, B, T], coefficients k - 1 and k of the product without each class of the top group
    c: Tensor  # [k + 1, B, 1], coefficients of the whole product


def _group_size(k: int, n: int) -> int:
    """Return the size of the top group: 2k + 1. With this size, the odds of all other classes are below 1."""
    return min(n, 2 * k + 1) if k <= WITH_TAIL else n


def _solve(
    s: Tensor,
    top: Tensor,
    group: Tensor,
    where: Tensor,
    k: int,
    balance: int,
    theta: float,
    of_next: _Solution | None = None,
) -> _Solution:
    """Solve for k with the tilt for ``balance`` classes.

    ``top`` are the largest scores [B, T], ``group`` the same scores with a gradient, and ``where`` their classes. The
    solution for ``balance + 1`` has the same tail, except that odds differ by one factor per row.
    """
    # subtract this score first: scores and tilt far from 0 would lose precision
    a = top[:, balance - 1 : balance].detach()
    x_top = ((top - a) / theta).detach()
    tail, P, start, mass, shift = None, None, torch.ones_like(a)[None], torch.zeros_like(a), 0.0
    if of_next is not None:
        tail, shift = of_next.tail, (of_next.a - a) / theta
        mass = of_next.mass * shift.exp()
    elif top.shape[1] < s.shape[1]:
        tail = ((s - a) / theta).scatter(1, where, -torch.inf).exp()
        mass = tail.detach().sum(-1, keepdim=True)
    t = tilt(x_top, mass, balance)
    if tail is not None:
        shift = shift - t if of_next is None else shift + of_next.t - t
        tail = tail * shift.exp()
        P = power_sums(tail, k) if of_next is None or of_next.P is None else _tilted(of_next.P, shift)
        start = from_power_sums(P)
    w = (((group - a) / theta) - t).clamp_max(MAX_GAP).exp()
    q = 1 / (1 + w)
    p = w * q
    levels = product_tree(torch.stack((q, p)), k)
    outside, c = leave_one_out(levels, start, k, 2), product(levels[-1], start, 0, 0, k)
    return _Solution(a, t, mass, tail, P, p, q, outside, c)


def _probabilities(s: Tensor, top: Tensor, where: Tensor, k: int, theta: float, outside: int) -> Tensor:
    """Return the probability [B, n] that each class is in the set, or outside of it, both without cancellation."""
    f = _solve(s, top, top, where, k, k, theta)
    cases = f.p * f.outside[0], f.q * f.outside[1]  # in the set, outside of it
    in_top = cases[outside] / (cases[0] + cases[1])
    if f.tail is None:
        return torch.zeros_like(s).scatter(1, where, in_top)
    below, last = divide_out(f.c / f.c[k], f.tail, k)
    return (last if outside else f.tail * below).scatter(1, where, in_top)


def _group_margins(group: Tensor, f: _Solution, theta: float, members: slice) -> Tensor:
    # only for these classes: with the tilt for other classes, the ratio may be 0 / 0 with a NaN gradient
    below, last = f.outside[..., members]
    return (group - f.a)[:, members] + theta * ((below / last).log() - f.t)


def tilt(x: Tensor, mass: Tensor, k: int) -> Tensor:
    """Return t [B, 1] of formula (5): min over m < k of log((sum of exp outside the m largest) / (k - m)).

    The tilt cancels from every result, so the tilt need not be precise. With this tilt, the expected number of classes
    is between k/2 and k. Results are relative to the probability of exactly k classes, which may be 2^-k. Hence larger
    k use ``tilt_to_mean``.

    Args:
        x: the top group [B, T], largest first, relative to the k-th.
        mass: the sum of the odds of all other classes [B, 1].
        k: number of classes to draw.
    """
    if k > SMALL_K:
        return tilt_to_mean(x, mass, k)
    R = x.clamp_max(60.0).exp().flip(1).cumsum(1).flip(1)[:, :k] + mass  # sum outside the m largest, m = 0..k-1
    return (R / torch.arange(k, 0, -1, dtype=x.dtype, device=x.device)).amin(1, keepdim=True).log()


def tilt_to_mean(x: Tensor, mass: Tensor, k: int | Tensor) -> Tensor:
    """Return the tilt t [B, 1] with an expected k - 1/2 classes, from x [B, n] relative to the k-th largest.

    The most probable number of classes is then k - 1 or k, with a probability of at least 1 / (n + 1). k may be a
    tensor [B, 1]. ``mass`` is the sum of the odds of classes that are not in x.
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
    """Return P_j = sum_i w_i^j, j = 1..k: [B, n] -> [B, k].

    Powers that would be denormal are dropped, because denormal numbers are slow. The bound on odds increases each time
    the powers reach the end of the exponent range. Dropped squares are at most 2^-50 (2^-120 in double precision) each.
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
    """Return w [B, n] as [B, blocks, length], padded with zeros. Two short sums have less rounding than one long sum.

    onnxruntime adds a row in order. For 20,000 equal values, this costs 1.5 digits.
    """
    n = w.shape[1]
    length = 1 << math.isqrt(n).bit_length()
    blocks = -(-n // length)
    return F.pad(w, (0, blocks * length - n)).unflatten(1, (blocks, length))


def from_power_sums(P: Tensor) -> Tensor:
    """Return coefficients 0..k of prod_i (1 + w_i X) by Newton's identities: [B, k] -> [k + 1, B, 1].

    For large k, all coefficients are scaled by one factor to avoid overflow.
    """
    k = P.shape[1]
    signed = P * torch.tensor([(-1.0) ** i for i in range(k)], dtype=P.dtype, device=P.device)
    b = torch.ones_like(P[:, :1]) if k <= SMALL_K else (-0.5 * P[:, :1]).exp()  # b_{j-1}, ..., b_0
    for j in range(1, k + 1):
        b = torch.cat(((b * signed[:, :j]).sum(-1, keepdim=True) / j, b), -1)
    return b.flip(-1).t().unsqueeze(-1)


def product_tree(factors: Tensor, k: int) -> list[Tensor]:
    """Return the levels of a tree of products of T factors [2, B, T], up to degree k.

    A level whose nodes have m leaves is [min(m, k) + 1, B, ceil(T / m)]. Node i has the children i and i + half.
    """
    levels = [factors]
    while levels[-1].shape[-1] > 1:
        left, right = _halves(levels[-1])
        levels.append(product(left, right, 0, 0, min(k, 2 * len(left) - 2)))
    return levels


def leave_one_out(levels: list[Tensor], start: Tensor, k: int, count: int) -> Tensor:
    """Return the last ``count`` coefficients up to degree k without each factor: [count, B, T].

    The product outside of a node is the product outside of its parent times its sibling. All terms are positive, so
    there is no cancellation.

    Args:
        levels: result of ``product_tree``.
        start: polynomial that is a factor of every product [m, B, 1].
        k: highest degree.
        count: number of coefficients per class. Coefficients of negative degree are 0.
    """
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
    """Split the nodes of a level into two halves. If their number is odd, pad with the polynomial 1."""
    if x.shape[-1] % 2:
        x = torch.cat((F.pad(x[:1], (0, 1), value=1.0), F.pad(x[1:], (0, 1))))
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def product(a: Tensor, b: Tensor, first: int, low: int, high: int) -> Tensor:
    """Return coefficients low to high of (a_0 + a_1 X + ...)(b_0 X^first + b_1 X^(first + 1) + ...)."""
    if len(a) > len(b) and first == 0:
        a, b = b, a
    if len(a) * (high - low + 1) > 4096:  # as a sum of shifted products, which needs less memory
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
    """Return coefficients k - 1 and k [B, n] of the product c [k + 1, B, 1] without the factor 1 + w_i X, w_i < 1."""
    d = c[0]
    for j in range(1, k):
        d = torch.addcmul(c[j], w, d, value=-1)
    return d, torch.addcmul(c[k], w, d, value=-1)


class State(NamedTuple):
    """Summary of the classes of a chunk: O(k) numbers per row, whatever the number of classes.

    Odds are exp((s - a) / theta), where ``a`` is the k-th largest score. Merging chunks can only raise ``a``, so odds
    are only ever scaled down.
    """

    top: Tensor  # [B, T], the largest scores in descending order, T = 2k + 1, or all classes if they are fewer
    classes: Tensor  # [B, T], their classes
    P: Tensor  # [B, k], power sums of the odds of the other classes


class Coefficients(NamedTuple):
    """Result of :func:`finish`: values that margins and gradients of any class need from all other classes."""

    a: Tensor  # [B, 1], the k-th largest score
    shift: Tensor  # [B, 1], double: the margin of a class outside the state is (s - a) + shift
    scale: Tensor  # [B, 1], factor from exp((s - a) / theta) to the tilted odds of c
    c: Tensor  # [k + 1, B, 1], with c_{k-1} = c_k = 1
    classes: Tensor  # [B, T], the top group
    in_top: Tensor  # [B, T], gradient of this margin with respect to the scores of the top group


@torch.no_grad()
def summarize(s: Tensor, k: int, theta: float, first_class: int = 0) -> State:
    """Return the state of classes first_class, first_class + 1, ... from their scores [B, m]; -inf excludes a class."""
    top, classes = s.topk(min(2 * k + 1, s.shape[1]), dim=-1)
    e = ((s - _reference(top, k)) / theta).scatter(1, classes, -torch.inf).exp()
    return State(top, classes + first_class, power_sums(e, k))


@torch.no_grad()
def merge(states: Sequence[State], theta: float) -> State:
    """Return the state of the classes of all states, with power sums in double precision.

    The result is bitwise reproducible for the same order of states.
    """
    k = states[0].P.shape[1]
    top, order = torch.cat([state.top for state in states], 1).sort(dim=1, descending=True, stable=True)
    T = min(top.shape[1], 2 * k + 1)
    a = _reference(top, k).double()
    P = power_sums(((top[:, T:].double() - a) / theta).exp(), k)
    for state in states:
        P = P + _tilted(state.P.double(), (_reference(state.top, k).double() - a) / theta)
    classes = torch.cat([state.classes for state in states], 1).gather(1, order[:, :T])
    return State(top[:, :T], classes, P)


def _reference(top: Tensor, k: int) -> Tensor:
    """Return the k-th largest score [B, 1], or the lowest finite number if there are fewer scores."""
    low = torch.finfo(top.dtype).min
    return top[:, k - 1 : k].clamp_min(low) if top.shape[1] >= k else top.new_full((len(top), 1), low)


def _tilted(P: Tensor, shift: Tensor) -> Tensor:
    """Return the power sums [B, k] of odds times exp(shift) [B, 1]. Power sums of 0 remain 0."""
    j = torch.arange(1, P.shape[1] + 1, dtype=P.dtype, device=P.device)
    return torch.where(P == 0, P, P * (shift * j).exp())


@torch.no_grad()
def finish(state: State, theta: float) -> Coefficients:
    """Return the coefficients of the product over all classes of a state with at least k finite scores."""
    k, a = state.P.shape[1], state.top[:, state.P.shape[1] - 1 : state.P.shape[1]]
    x = (state.top.double() - a.double()) / theta
    t = tilt(x, state.P[:, :1].double(), k)
    w = (x - t).clamp_max(MAX_GAP).exp()
    q = 1 / (1 + w)
    start = from_power_sums(_tilted(state.P.double(), -t))
    levels = product_tree(torch.stack((q, w * q)), k)
    c = product(levels[-1], start, 0, 0, k)
    e = leave_one_out(levels, start, k, 3)  # degrees k - 2, k - 1, k
    in_top = w * q * (e[0] / c[k - 1] - e[1] / c[k])
    rho = c[k - 1] / c[k]
    degree = torch.arange(k + 1, dtype=c.dtype, device=c.device)[:, None, None]
    balanced = c / c[k] * (rho.log() * (degree - k)).clamp_max(MAX_GAP).exp()
    balanced = torch.where(balanced < 2.0**-70, 0.0, balanced)  # avoids denormal numbers, which do not affect results
    dtype = a.dtype
    return Coefficients(
        a, theta * (rho.log() - t), (rho * (-t).exp()).to(dtype), balanced.to(dtype), state.classes, in_top.to(dtype)
    )


def _scatter_own(out: Tensor, classes: Tensor, values: Tensor, first_class: int) -> Tensor:
    """Write values [B, T] at their classes into a chunk [B, m]. Classes of other chunks go to an extra column."""
    m, local = out.shape[1], classes - first_class
    place = torch.where((local >= 0) & (local < m), local, m)
    return F.pad(out, (0, 1)).scatter(1, place, values)[:, :m]


@torch.no_grad()
def label_gradient(s: Tensor, f: Coefficients, theta: float, first_class: int = 0) -> Tensor:
    """Return the gradient of the label's margin with respect to the scores of a chunk [B, m], by formula (10).

    ``f`` covers all classes but the label. At the label, the gradient is 1. The caller writes this gradient.
    """
    k = len(f.c) - 1
    v = ((s - f.a) / theta).clamp_max(0.0).exp() * f.scale  # entries of the top group are overwritten later
    if k == 1:
        return _scatter_own(-v, f.classes, f.in_top, first_class)
    below, _ = divide_out(f.c[:k], v, k - 1)  # d_{k-2}
    return _scatter_own(v * (below * (1 + v) - 1), f.classes, f.in_top, first_class)


@torch.no_grad()
def chunk_margins(s: Tensor, f: Coefficients, theta: float) -> Tensor:
    """Return the margins [B, m] of the classes of a chunk. Margins are valid outside of the top group of ``f``."""
    v = ((s - f.a) / theta).clamp_max(0.0).exp() * f.scale
    below, last = divide_out(f.c, v, len(f.c) - 1)
    return (s - f.a) + f.shift.to(s) + theta * (below / last).log()


@torch.no_grad()
def top_margins(state: State, theta: float) -> Tensor:
    """Return the margins [B, k] of the k largest classes in double precision, from a state for k + 1."""
    k = state.P.shape[1] - 1
    gap = state.top.double() - state.top[:, k : k + 1].double()
    x = gap / theta
    t = tilt(x, state.P[:, :1].double(), k + 1)
    w = (x - t).clamp_max(MAX_GAP).exp()
    q = 1 / (1 + w)
    start = from_power_sums(_tilted(state.P[:, :k].double(), -t))
    outside = leave_one_out(product_tree(torch.stack((q, w * q)), k), start, k, 2)
    return gap[:, :k] + theta * ((outside[0] / outside[1]).log() - t)[:, :k]
