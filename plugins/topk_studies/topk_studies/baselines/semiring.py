"""Two ways to hold positive numbers: as they are, and as their logarithms.

The elementary symmetric polynomials need sums and products only, so every algorithm here is written once and runs in
either: in linear space, where sigma_k leaves the range of floats when k or the scores are large, and in log space.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Semiring:
    one: float
    exp: Callable[[Tensor], Tensor]  # the number e^x
    log: Callable[[Tensor], Tensor]  # the logarithm of a number
    times: Callable[[Tensor, Tensor], Tensor]
    plus: Callable[[Tensor, Tensor], Tensor]
    total: Callable[[Tensor], Tensor]  # the sum over the first axis


LINEAR = Semiring(one=1.0, exp=torch.exp, log=torch.log, times=torch.mul, plus=torch.add, total=lambda t: t.sum(0))
LOG = Semiring(
    one=0.0,
    exp=lambda x: x,
    log=lambda x: x,
    times=torch.add,
    plus=torch.logaddexp,
    total=lambda t: t.logsumexp(0),
)
