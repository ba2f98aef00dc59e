r"""The label-distributionally robust loss: one temperature for all rows.

It is a curve of the label's probability under softmax(s / temperature). Towards a large temperature log p of every
label is near -log n, and the loss is made of what is left of their difference. The definition takes it from
exponentials less 1 instead, which keep their digits.
"""

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from topk_registry.ops.rows.api import RowLoss
from topk_registry.ops.rows.curve import Curve
from topk_registry.ops.softmax.api import softmax_rows
from topk_registry.ops.softmax.definition import log_probabilities
from topk_registry.ops.targets.table import of_table, wide
from topk_registry.ops.values import integer, number

# beyond this temperature kernels in single precision lose more than 1e-6 of a loss
WARMEST = 10.0
HALF = -0.5  # from here up log1p has all digits of log mean exp, below it the curve has
LARGE = 60.0  # a gap over the temperature whose exponential is still far from overflow in single precision


def _robust(log_p, log_not, p, not_p, own, numbers):
    # numbers: exp(gap / lambda) - 1, lambda, log n; log(1 + exp(gap / lambda - log-odds)), without exponentials
    rest = numbers[0] * not_p
    return numbers[1] * (math.log1p(rest) - log_p - numbers[2]), -numbers[1] * (rest + not_p) / (1.0 + rest)


def _robust_far(log_p, log_not, p, not_p, own, numbers):
    # numbers: gap / lambda, lambda, log n
    z = numbers[0] - (log_p - log_not)
    e = math.exp(-abs(z))
    most = numbers[1] / (1.0 + e)
    return numbers[1] * (max(z, 0.0) + math.log1p(e) - numbers[2]), -most if z > 0.0 else -e * most


def ldr_rows(n: int, *, temperature: float = 1.0, gap: float = 1.0) -> RowLoss:
    """The loss LDR-KL of n classes, temperature * log mean_l exp(z_l / temperature), for
    :func:`topk_registry.rows.row_losses`.

    Args:
        n: number of classes.
        temperature: lambda, positive; above 10 torch operations serve, whose digits do not depend on it.
        gap: how far the label must be ahead, at least 0.

    Example:
        >>> row_losses(ldr_rows(4, temperature=1e6), torch.zeros(1, 4), torch.tensor([0]))
        tensor([0.7500])
    """
    n = integer(n, "n", at_least=1)
    temperature, gap = number(temperature, "temperature", above=0), number(gap, "gap", at_least=0)
    definition = partial(ldr, temperature, gap)
    if temperature > WARMEST:
        return RowLoss(definition)
    relative = gap / temperature
    form, first = (_robust, math.expm1(relative)) if relative <= LARGE else (_robust_far, relative)
    curve = Curve(
        lambda log_p, log_not, own: _of_log_odds(temperature, gap, n, log_p - log_not),
        form,
        (first, temperature, math.log(n)),
    )
    return replace(softmax_rows(curve, scale=1 / temperature), definition=definition)


def ldr(temperature: float, gap: float, scores: Tensor, target: Tensor | None) -> Tensor:
    """The losses of :func:`ldr_rows`."""
    s, n = wide(scores), scores.shape[1]
    a = s.detach().amax(-1, keepdim=True)  # held fixed: the losses do not depend on the origin
    u = (s - a) / temperature
    less = math.expm1(-gap / temperature)  # so much less the label's own exponential is than with the gap
    mean = u.expm1().mean(-1, keepdim=True) + less / n * u.exp()
    near = gap + (a - s) + temperature * mean.clamp(min=HALF).log1p()
    log_p, log_not = log_probabilities(s / temperature)
    far = _of_log_odds(temperature, gap, n, log_p - log_not)
    return of_table(torch.where(mean > HALF, near, far), target)


def _of_log_odds(temperature: float, gap: float, n: int, log_odds: Tensor) -> Tensor:
    # torch's own threshold of 20 leaves an error of 2e-9
    return temperature * (F.softplus(gap / temperature - log_odds, threshold=40.0) - math.log(n))
