"""The margins of every class by torch operations alone, as a fixed graph in double precision.

These are formulas (5) to (9) of README.md. Any transform of torch goes through them: second derivatives, forward mode,
``torch.func.vmap``. They are slower than the kernels.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from topk_registry.ops.ksubset.onnx_form import divide_out, from_power_sums, tilt, tree


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
    found = torch.cat(in_top, 1)
    if w is None:
        return torch.zeros_like(s).scatter(1, where, found)
    below, last = divide_out(c, w, k)
    return ((s - t) + theta * (below / last).log()).scatter(1, where, found)


def label_margins(s: Tensor, label: Tensor, k: int, theta: float) -> Tensor:
    """The margin of each row's label: [B, n], [B] -> [B]."""
    return margins(s, k, theta).gather(1, label[:, None])[:, 0]


def gradient(function: Callable[..., Tensor], g: Tensor, s: Tensor, *args: Any) -> Tensor:
    """The gradient of ``function(s, *args)`` to s for the cotangent g, differentiable to s and g itself."""
    with torch.enable_grad():
        return torch.autograd.grad(function(s, *args), s, g, create_graph=True)[0]
