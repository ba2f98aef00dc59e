"""ALDR-KL in torch operations; see README.md."""

import math

import torch
from torch import Tensor

from topk_registry.ops.targets.table import nan_where_broken, wide

STEPS = 14  # evaluations of the divergence; three to six suffice unless two solutions nearly meet
ROUNDING = 32.0  # times eps and the size of a term: by so much a step may seem to go too far
SETTLED = 1000.0  # how much shorter than lambda_0 the last step is where the search has ended
HALF = -0.5  # from here up log1p of a mean of expm1 has all digits, below it the logarithm of a sum has
LEAST = -1e30  # in place of -inf, whose product with a probability of 0 is NaN


def aldr(temperature: float, alpha: float, gap: float, scores: Tensor, target: Tensor | None) -> Tensor:
    """The losses of :func:`topk_registry.ops.robust.api.aldr_rows`."""
    s = wide(scores)
    return nan_where_broken(_aldr(temperature, alpha, gap, s, target), s)


def _aldr(temperature: float, alpha: float, gap: float, s: Tensor, target: Tensor | None) -> Tensor:
    if target is None:
        x = s[:, None] + gap * (1 - torch.eye(s.shape[1]).to(s))
        a = _highest(x)
        return _above(x - a, temperature, alpha) + (a[..., 0] - s)
    if not target.is_floating_point():
        classes = torch.arange(s.shape[1], device=s.device)
        x = s + gap * (classes != target[:, None])
        a = _highest(x)
        return _above(x - a, temperature, alpha) + (a - s.gather(1, target[:, None]))[:, 0]
    mass = target.sum(-1, keepdim=True)
    q = target / torch.where(mass == 0, 1.0, mass)
    x = s + gap * (1 - q)
    a = _highest(x)
    ahead = torch.where(q == 0, 0.0, q * (a - s)).sum(-1)
    return mass[:, 0] * (_above(x - a, temperature, alpha) + ahead)


def _highest(x: Tensor) -> Tensor:
    """The largest number [..., 1], held fixed: the losses do not depend on the origin."""
    return x.detach().amax(-1, keepdim=True)


def _log_mean_exp(u: Tensor) -> Tensor:
    """log mean exp [...] of u [..., n] up to 0, without a difference of near numbers where all are close to 0."""
    mean = u.expm1().mean(-1)
    near = mean.clamp(min=HALF).log1p()
    return torch.where(mean > HALF, near, u.logsumexp(-1) - math.log(u.shape[-1]))


def _above(z: Tensor, temperature: float, alpha: float) -> Tensor:
    """Equation 1 [...] for z [..., n] up to 0."""
    z, log_n = z.clamp(min=LEAST), math.log(z.shape[-1])
    stiffness = alpha * log_n / temperature
    lam = _temperature(z.detach(), temperature, stiffness, alpha)
    # a step of Newton's makes lambda a function of z, so that derivatives of the gradient are right
    divergence, slope, _ = _divergence(z, lam)
    excess = stiffness * (temperature - lam) - divergence
    steepness = (stiffness + slope).detach()
    # at a fold lambda jumps, and steps that are still long there have no derivative to give
    stable = steepness * temperature > SETTLED * excess.detach().abs()
    lam = lam + torch.where(stable, excess / torch.where(stable, steepness, 1.0), 0.0)
    return lam * _log_mean_exp(z / lam[..., None]) - 0.5 * stiffness * (lam - temperature) ** 2


def _temperature(z: Tensor, temperature: float, stiffness: float, alpha: float) -> Tensor:
    """The largest lambda [...] of equation 2, by the steps of README.md."""
    least, rounding = temperature * (1 - 1 / alpha), ROUNDING * torch.finfo(z.dtype).eps * temperature

    def tried(lam: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        divergence, slope, concave = _divergence(z, lam)
        return lam, temperature - lam - divergence / stiffness, 1 + slope / stiffness, concave

    lam, step, steepness, concave = tried(torch.full_like(z[..., 0], temperature))
    low = torch.full_like(lam, -torch.inf)  # the last step that went beyond the solution
    certain = torch.zeros_like(concave)  # no step of Newton's can
    for _ in range(STEPS - 1):
        certain = certain | (concave & (step <= 0))
        newton = lam + step / torch.where(steepness > 0, steepness, 1.0)
        half_way = (lam + low.clamp(min=least)) / 2
        there = tried(torch.where((steepness > 0) & (newton > low), newton.clamp(min=least), half_way))
        beyond = ~certain & (there[1] > rounding)
        low = torch.where(certain, -torch.inf, torch.where(beyond, there[0], low))
        here = lam, step, steepness, concave
        lam, step, steepness, concave = (torch.where(beyond, a, b) for a, b in zip(here, there, strict=True))
    return lam


def _divergence(z: Tensor, lam: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """KL(p || uniform) [...] with p = softmax(z / lambda), its slope in lambda, and whether it is concave there."""
    u = z / lam[..., None]
    ahead = u - _log_mean_exp(u)[..., None]  # log p + log n, which is small where all u are close to 0
    p = ahead.exp() / z.shape[-1]
    divergence = torch.where(p == 0, 0.0, p * ahead).sum(-1)
    centred = torch.where(p == 0, 0.0, ahead - divergence[..., None]).detach()
    square = p * centred**2
    variance = square.sum(-1)
    concave = 3 * variance + (square * centred).sum(-1) <= 0
    return divergence, -variance / lam, concave
