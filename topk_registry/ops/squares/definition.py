"""The losses of sums of squares in torch operations, whose squares cannot overflow."""

import math

import torch
from torch import Tensor

from topk_registry.ops.targets.table import of_table, wide

XI_MIN = 1e-4
NEWTON_STEPS = 6


def log_likelihood(epsilon: float, shift: float, scores: Tensor, target: Tensor | None) -> Tensor:
    """log sum_j w_j - log w_c, w = (scores + shift)^2 + epsilon."""
    x = wide(scores) + shift
    total = log_sum_of_weights(x, epsilon)
    if target is not None and not target.is_floating_point():
        return (total - log_weight(x.gather(1, target[:, None]), epsilon))[:, 0]
    return of_table(total - log_weight(x, epsilon), target)


def quadratic_bound(scores: Tensor, target: Tensor | None) -> Tensor:
    """Bouchard's bound on log sum_j exp(s_j) - s_c."""
    s = wide(scores)
    centred = s - s.mean(-1, keepdim=True)
    return of_table(log_partition_bound(centred) - centred, target)


def log_sum_of_weights(x: Tensor, epsilon: float) -> Tensor:
    """log sum_i (x_i^2 + epsilon) of rows [B, n] -> [B, 1]."""
    peak, sum_of_squares = _scaled_squares(x, math.sqrt(epsilon))
    return (sum_of_squares + x.shape[1] * (math.sqrt(epsilon) / peak).square()).log() + 2 * peak.log()


def log_weight(x: Tensor, epsilon: float) -> Tensor:
    """log(x^2 + epsilon), elementwise; hypot because the square overflows in single precision from 2e19 on."""
    return 2 * torch.hypot(x, x.new_full((), math.sqrt(epsilon))).log()


def log_partition_bound(centred: Tensor) -> Tensor:
    """The bound on log sum_i exp of centred scores [B, D] -> [B, 1].

    It depends on the scores through v = mean c_i^2 alone. At the tightest xi its slope in v is D lambda(xi), as if xi
    were fixed; its second derivative is D dlambda/dv. A Taylor series around v gives autograd both, and leaves the
    value alone.
    """
    return _bound(*_scaled_squares(centred, torch.finfo(centred.dtype).tiny), centred.shape[1])


def quadratic_bound_of_sums(s: Tensor, q: Tensor, score: Tensor, n: int) -> Tensor:
    """The bound from the label's score, the sum s and the sum of squares q of all n scores, elementwise."""
    spread = (q - s.square() / n).clamp(min=0)
    return _bound(torch.ones_like(spread), spread, n) + s / n - score


def _bound(peak: Tensor, sum_of_squares: Tensor, D: int) -> Tensor:
    """The bound from the sum of squares of (s_i - m) / peak over the D scores."""
    fixed = sum_of_squares.detach()
    with torch.no_grad():
        rms = peak * (fixed / D).sqrt()
        xi = optimal_xi(rms, D)
        u = 2 * torch.sigmoid(-xi)
        t = torch.tanh(xi / 2)
        constant = xi / t * ((D - 1) / D - D / 4 * u.square()) + D * torch.log1p(torch.exp(-xi))
        # lambda peak^2 without the square: peak / xi is moderate, as xi grows with the scores
        quadratic = t / 4 * (peak / xi) * peak
        W, W_slope = _w(xi, 2 / D)
        xi_slope = 1 / (2 + xi * W_slope / W.clamp(min=torch.finfo(W.dtype).tiny))  # d log xi / d log v
        lambda_slope = (xi * (1 - t.square()) / (2 * t) - 1) * xi_slope  # d log lambda / d log v
        curvature = lambda_slope * (quadratic / fixed.clamp(min=torch.finfo(fixed.dtype).tiny))
        curvature = torch.where(curvature.isfinite(), curvature, 0.0)
    step = sum_of_squares - fixed
    return constant + quadratic * sum_of_squares + curvature / 2 * step.square()


def optimal_xi(rms: Tensor, D: int) -> Tensor:
    """The xi of the tightest bound, for scores of root mean square ``rms`` around their mean, elementwise.

    With d = 2/D and u = 1 - tanh(xi/2) the equation is xi^2 W = rms^2, W = (d - u)(2 - d - u) / (1 - u)^2, free of
    cancellation for large D; its left side grows with xi. As W <= c^2 = d(2 - d), and W >= c^2 (1 - u/d) >= (c/1.5)^2
    from log(D-1) + 1 on, the root is bracketed, and Newton's method from the middle reaches it to 1e-9 in 5 steps for
    D from 3 to 1e8 and any rms. Squares of xi and rms are never formed: they may overflow.
    """
    d = 2 / D
    c = math.sqrt(d * (2 - d))
    # D = 2 on a flat row: xi = 0 is the limit of the bound, which is flat enough there to stay clear of 0/0
    low = (rms / c).clamp(min=max(math.log(D - 1), XI_MIN))
    if D == 2:  # W is 1
        return low
    high = (1.5 * rms / c).clamp(min=math.log(D - 1) + 1)
    xi = (low + high) / 2
    for _ in range(NEWTON_STEPS):
        W, slope = _w(xi, d)
        xi = (xi - (xi * W - rms * (rms / xi)) / (2 * W + xi * slope)).clamp(low, high)
    return xi


def _w(xi: Tensor, d: float) -> tuple[Tensor, Tensor]:
    """1 - (1-d)^2 / tanh(xi/2)^2, not below 0 by rounding, and its derivative."""
    u = 2 * torch.sigmoid(-xi)
    t = 1 - u
    slope = 2 * (1 - d) ** 2 * u * (1 - u / 2) / t**3
    return ((d - u) * (2 - d - u) / t**2).clamp(min=0), slope


def _scaled_squares(x: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """A scale p [B, 1] for each row, and sum_i (x_i / p)^2 [B, 1], which cannot overflow.

    The scale is held fixed in the gradient: p^2 times the sum does not depend on it.
    """
    fixed = x.detach()
    peak = torch.maximum(fixed.amax(-1, keepdim=True), -fixed.amin(-1, keepdim=True)).clamp(min=least)
    # a vector norm would spare a temporary, but adds up naively: off by 1e-3 in single precision at n = 1e6
    return peak, (x / peak).square().sum(-1, keepdim=True)
