"""Two representations of positive numbers: the numbers (``LINEAR``), or the logarithms of the numbers (``LOG``).

The algorithms for elementary symmetric polynomials need only sums and products. Therefore each algorithm is written
once, and runs with both representations. With ``LINEAR``, the polynomials overflow if k or the scores are large.
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
    one=0.0, exp=lambda x: x, log=lambda x: x, times=torch.add, plus=torch.logaddexp, total=lambda t: t.logsumexp(0)
)
