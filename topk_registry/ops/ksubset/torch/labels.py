"""The margin of each row's label and its gradient in plain torch operations."""

import torch
from torch import Tensor

from topk_registry.ops.ksubset.torch import flat
from topk_registry.ops.ksubset.torch.rows import (
    WITH_TAIL,
    Coefficients,
    finish,
    power_sums,
    row_blocks,
    summarise,
    tail_gradient,
)

LIMIT = 1 / 2  # of a tail's odds
SMALL = 16  # least k for groups of k classes: below it, more rows need others than the smaller products save


def label_margins(s: Tensor, label: Tensor, k: int, theta: float) -> tuple[Tensor, Tensor]:
    """The margin theta l_y [B] of each row's label and its gradient to the scores: [B, n], [B] -> [B], [B, n].

    The label's own factor is left out from the start, so c is what l_y = x_y + log c_{k-1} - log c_k needs, and with
    d = c / (1 + w_i X)

        dl_y/dx_i = w_i (d_{k-2} / c_{k-1} - d_{k-1} / c_k),  i != y:

    the chance of class i in a (k-1)-subset less that in a k-subset of the others. The margin is in double precision, a
    number a row, so that the small losses of well-placed labels keep their digits.
    """
    odds = flat.odds(s, k, theta, LIMIT, label)
    small = s.device.type == "cpu" and SMALL <= k <= WITH_TAIL
    if odds is None:
        return _with_group(s, label, k, theta, small)
    w, a, others = odds
    f = flat.polynomial(torch.cat([power_sums(w[rows], k) for rows in row_blocks(w)], 1))
    shift = theta * (f.log_ratio.double() - f.t.double())
    nothing = a.new_empty(len(s), 0)
    margin, gradient = _finished(s, label, w, Coefficients(a, shift, f.scale, f.c, nothing.long(), nothing))
    if len(others):
        margin[others], gradient[others] = _with_group(s[others], label[others], k, theta, small)
    return margin, gradient


def _with_group(s: Tensor, label: Tensor, k: int, theta: float, small: bool) -> tuple[Tensor, Tensor]:
    """With a top group of k classes where it is ``small`` and those are enough, else of the usual size."""
    w = torch.empty_like(s)
    f = finish(summarise(s, k, theta, label=label, out=w, size=k if small else None), theta)
    others = (~(f.scale * w.amax(1) <= LIMIT)).nonzero()[:, 0] if small else ()  # one with a NaN too
    margin, gradient = _finished(s, label, w, f)
    if len(others):
        margin[others], gradient[others] = _with_group(s[others], label[others], k, theta, small=False)
    return margin, gradient


def _finished(s: Tensor, label: Tensor, w: Tensor, f: Coefficients) -> tuple[Tensor, Tensor]:
    label = label[:, None]
    margin = s.gather(1, label)[:, 0].double() - f.a.double() + f.shift
    return margin, tail_gradient(w, f).scatter_(1, f.classes, f.in_top).scatter_(1, label, 1.0)
