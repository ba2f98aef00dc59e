"""The operator as a fixed graph of standard operators: the form that exports to ONNX, and that any transform can take.

The formulas are (5) to (9) of README.md. The top group is multiplied in by a balanced tree. Going up, each node holds
the product of its leaves' factors q_i + p_i X. Going down, it holds the product of everything outside it, and the root
starts with the tail. The outside of a leaf is its leave-one-out polynomial, a sum of positive terms.

Nothing here depends on the data: the graph has no loop or branch, and its shapes follow from n and k. It holds no
Sigmoid, because onnxruntime's is wrong far below zero, and no MatMul, because GPUs round its inputs to TF32 and
quantisers replace it.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

SMALL_K = 64  # up to this k, 2^-k is far from the least number in fp32
STEPS = 10  # of Newton's method, of at most 1 each: k classes with odds of e^t are all drawn with chance exp(-k e^-t)
CERTAIN = 80.0  # odds above exp(80) give the same marginals in fp32, and exp(80) is finite


def static_marginals(logits: Tensor, k: int, temperature: float = 1.0) -> Tensor:
    """The chance that each class is in the top-k set, as a graph that exports.

    pi_i = w_i sigma_{k-1}(w without i) / sigma_k(w),  w = exp(logits / temperature)

    Args:
        logits: scores [B, n] in fp32 (or fp64), n > k.
        k: size of the set.
        temperature: divides the scores.

    Example:
        >>> static_marginals(torch.zeros(1, 4), 2)
        tensor([[0.5000, 0.5000, 0.5000, 0.5000]])
    """
    group, tail, c = _solve(logits, k, temperature)
    chosen, not_chosen = group.p * group.outside[0], group.q * group.outside[1]
    chance = chosen / (chosen + not_chosen)
    if tail is None:
        return torch.zeros_like(logits).scatter(1, group.indices, chance)
    d, _ = divide_out(c, tail, k)
    return (tail * d / c[k]).scatter(1, group.indices, chance)


class _Group(NamedTuple):
    """The largest classes: where they are, p and q of each [B, T], the coefficients k-1, k without each [2, B, T]."""

    indices: Tensor
    p: Tensor
    q: Tensor
    outside: Tensor


def _solve(logits: Tensor, k: int, temperature: float) -> tuple[_Group, Tensor | None, Tensor]:
    """The top group, the odds of the tail [B, n] (0 at the group), and the product's coefficients [k+1, B, 1]."""
    size = min(logits.shape[1], 1 << (2 * k).bit_length())
    top, indices = logits.topk(size, dim=-1)
    rest = logits.scatter(1, indices, -torch.inf) if size < logits.shape[1] else None
    t = tilt(top, rest, k, temperature)
    tail, start = None, t.new_ones(1, 1, 1)
    if rest is not None:
        tail = _odds(rest, t, temperature)
        start = from_power_sums(tail, k)
    w = _odds(top, t, temperature)
    q = 1 / (1 + w)
    outside, c = tree(torch.stack((q, w * q)), start, k)
    return _Group(indices, w * q, q, outside), tail, c


def _odds(s: Tensor, t: Tensor, temperature: float) -> Tensor:
    # scores are subtracted first and once: far below t the error of w is that of (s - t) / temperature
    return _divide(s - t, temperature).clamp_max(CERTAIN).exp()


def _divide(x: Tensor, temperature: float) -> Tensor:
    return x if temperature == 1.0 else x / temperature


def tilt(top: Tensor, rest: Tensor | None, k: int, temperature: float) -> Tensor:
    """t [B, 1], in units of the scores: min over m < k of log((sum of exp outside the m largest) / (k - m)).

    It cancels from the marginals, so it need not be precise. But it draws between k/2 and k classes: the chance of k,
    which all else is relative to, may be 2^-k. For large k Newton's method goes on to the t that draws k - 1/2.
    """
    top = _divide(top, temperature)
    start = top[:, :k, None]  # the largest score outside the m largest, m < k
    rest = None if rest is None else _log_sum_exp(_divide(rest, temperature), top[:, -1:])
    every = top if rest is None else torch.cat((top, rest), -1)
    # [m, i]: class i is one of the m largest
    skip = torch.ones(k, every.shape[1], dtype=torch.bool, device=top.device).tril(-1)
    outside = (every.unsqueeze(1) - start).masked_fill(skip, -torch.inf).exp().sum(-1, keepdim=True).log()
    wanted = torch.tensor([math.log(k - m) for m in range(k)], dtype=top.dtype, device=top.device)
    t = (start + outside - wanted[:, None]).amin(1)
    for _ in range(STEPS if k > SMALL_K else 0):
        p = 1 / (1 + (t - top).exp())
        drawn, slope = p.sum(-1, keepdim=True), (p * (1 - p)).sum(-1, keepdim=True)
        if rest is not None:  # of small odds
            odds = (rest - t).exp()
            drawn, slope = drawn + odds, slope + odds
        t = t + ((drawn - (k - 0.5)) / slope).clamp(-1.0, 1.0)
    return t if temperature == 1.0 else t * temperature


def _log_sum_exp(x: Tensor, bound: Tensor) -> Tensor:
    """log sum exp x [B, 1], given a bound on x; onnxruntime's own ReduceLogSumExp returns -inf for some rows."""
    bound = bound.clamp_min(-1e30)  # -inf - -inf is NaN
    return bound + (x - bound).exp().sum(-1, keepdim=True).log()


def from_power_sums(w: Tensor, k: int) -> Tensor:
    """Coefficients 0..k [k+1, B, 1] of prod (1 + w_i X); for large k, which they would grow beyond fp32 with, all times
    one factor.

    Newton's identities from the power sums P_i: j b_j = sum_i (-1)^(i-1) b_{j-i} P_i.
    """
    w = _blocks(w)
    power, sums = w, [w.sum(-1, keepdim=True)]  # [B, blocks, 1]
    for j in range(1, k):
        power = power * w
        sums.append(power.sum(-1, keepdim=True) * (-1) ** j)
    P = torch.cat(sums, -1).sum(1)
    b = torch.ones_like(P[:, :1]) if k <= SMALL_K else (-0.5 * P[:, :1]).exp()  # b_{j-1}, ..., b_0
    for j in range(1, k + 1):
        b = torch.cat(((b * P[..., :j]).mean(-1, keepdim=True), b), -1)
    return b.flip(-1).t().unsqueeze(-1)


def _blocks(w: Tensor) -> Tensor:
    """w [B, n] as [B, blocks, length], filled up with zeros: two short sums round less than one long one.

    onnxruntime adds a row up in order, so that 20,000 equal values lose a digit and a half.
    """
    n = w.shape[1]
    length = 1 << math.isqrt(n).bit_length()
    blocks = -(-n // length)
    return F.pad(w, (0, blocks * length - n)).unflatten(1, (blocks, length))


def tree(factors: Tensor, start: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Coefficients k-1, k without each factor [2, B, T], and 0..k of the whole product [k+1, B, 1].

    Args:
        factors: q and p of each factor q + p X [2, B, T].
        start: a polynomial that belongs to every product [m, B, 1].
    """
    levels, sizes = [], []
    while factors.shape[-1] > 1:
        sizes.append(factors.shape[-1])
        if sizes[-1] % 2:
            factors = torch.cat((F.pad(factors[:1], (0, 1), value=1.0), F.pad(factors[1:], (0, 1))))
        levels.append(factors)
        left, right = _halves(factors)
        factors = _product(left, right, 0, 0, min(k, 2 * len(factors) - 2))
    return _descend(levels, sizes, start, k), _product(factors, start, 0, 0, k)


def _descend(levels: list[Tensor], sizes: list[int], outside: Tensor, k: int) -> Tensor:
    wanted = [k - 1]  # the lowest coefficient that each level's outside must hold
    for level in levels[:-1]:
        wanted.append(max(0, wanted[-1] - len(level) + 1))
    first = 0
    for level, size, low in zip(reversed(levels), reversed(sizes), reversed(wanted), strict=True):
        left, right = _halves(level)
        sibling, parent = torch.cat((right, left), -1), torch.cat((outside, outside), -1)
        outside, first = _product(sibling, parent, first, low, k)[..., :size], low
    return outside


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _product(a: Tensor, b: Tensor, first: int, low: int, high: int) -> Tensor:
    """Coefficients low..high of (a_0 + a_1 X + ...)(b_0 X^first + b_1 X^(first+1) + ...), coefficients leading."""
    if len(a) > len(b) and first == 0:
        a, b = b, a
    index = [[j - i - first for i in range(len(a))] for j in range(low, high + 1)]
    if index[0][-1] < 0 or index[-1][0] >= len(b):
        zero = len(b)
        index = [[i if 0 <= i < zero else zero for i in row] for row in index]
        b = F.pad(b, (0, 0, 0, 0, 0, 1))
    return (a * b[torch.tensor(index, device=b.device)]).sum(1)


def divide_out(c: Tensor, w: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Coefficients k-1 and k [B, n] of the product c [k+1, B, 1] without the factor 1 + w_i X."""
    d = c[0]
    for j in range(1, k):
        d = c[j] - w * d
    return d, c[k] - w * d


def margins(s: Tensor, k: int, theta: float) -> Tensor:
    """The margins theta l of every class in double precision: [B, n], 2k <= n -> [B, n].

    Leaving out one of the k largest classes moves the balance to the class after them: those are computed with the tilt
    for k + 1.
    """
    s, n = s.double(), s.shape[1]
    top, where = s.detach().topk(min(2 * k + 3, n))
    all_in_top = top.shape[1] == n
    rest = None if all_in_top else s.detach().scatter(1, where, -torch.inf)
    s_top, in_top = s.gather(1, where), []
    # the classes of the other tilt are left out before they can turn into 0 / 0
    for balance, classes in ((k + 1, slice(0, k)), (k, slice(k, None))):
        t = tilt(top, rest, balance, theta).detach()
        x = (s_top - t) / theta
        # exp(-inf) is 0 with gradient 0
        w = None if all_in_top else ((s - t) / theta).scatter(1, where, -torch.inf).exp()
        start = x.new_ones(1, 1, 1) if w is None else from_power_sums(w, k)
        outside, c = tree(torch.stack((torch.sigmoid(-x), torch.sigmoid(x))), start, k)
        below, last = outside[..., classes]
        in_top.append((s_top[:, classes] - t) + theta * (below / last).log())
    of_top = torch.cat(in_top, 1)
    if w is None:
        return torch.zeros_like(s).scatter(1, where, of_top)
    below, last = divide_out(c, w, k)
    return ((s - t) + theta * (below / last).log()).scatter(1, where, of_top)


def label_margins(s: Tensor, label: Tensor, k: int, theta: float) -> Tensor:
    """The margin of each row's label: [B, n], [B] -> [B]."""
    return margins(s, k, theta).gather(1, label[:, None])[:, 0]


def gradient(function: Callable[..., Tensor], g: Tensor, s: Tensor, *args: Any) -> Tensor:
    """The gradient of ``function(s, *args)`` to s for the cotangent g, differentiable to s and g itself."""
    with torch.enable_grad():
        return torch.autograd.grad(function(s, *args), s, g, create_graph=True)[0]
