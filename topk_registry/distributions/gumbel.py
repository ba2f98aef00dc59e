"""Gumbel top-k: the k largest of scores with Gumbel noise, another distribution over sets of k classes."""

import math
from itertools import permutations
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints

from topk_registry.distributions.scores import check_numbers, check_scores, scaled
from topk_registry.ops.targets.table import wide

ORDER_LIMIT = 7  # k! orders of a set are summed over


class GumbelTopK(Distribution):
    """Lists of k of n classes: the k largest of logits / temperature + Gumbel noise, largest first (Plackett, Luce).

    It is sampling without replacement: after each draw the softmax is taken over the classes that are left. The law of
    the resulting sets is *not* that of :class:`KSubset`: there a set's probability is proportional to the product of
    its odds, here it is a sum over orders of products of softmaxes. Marginals differ (by 0.08 at most in our tests) and
    have no closed form here. Log-probabilities are computed in double precision, and are in single precision for logits
    in half precision.

    Args:
        logits: scores [..., n]; a class with -inf is in no list.
        k: length of the lists, 1 <= k <= n.
        temperature: divides the logits.
        validate_args: check that every row has k logits above -inf, and none that is inf or NaN; torch's default where
            None.

    Example:
        >>> distribution = GumbelTopK(torch.zeros(4), 2)
        >>> distribution.log_prob(torch.tensor([0, 3])).exp()  # of twelve lists
        tensor(0.0833)
        >>> distribution.set_log_prob(torch.tensor([0, 3])).exp()  # of six sets
        tensor(0.1667)

    Reference:
        Kool, van Hoof, Welling. Stochastic beams and where to find them. ICML 2019.
    """

    logits: Tensor
    k: int
    temperature: float

    def __init__(self, logits: Tensor, k: int, temperature: float = 1.0, validate_args: bool | None = None) -> None:
        check_scores(logits, temperature)
        if isinstance(k, bool) or not isinstance(k, Integral) or not 1 <= k <= logits.shape[-1]:
            raise ValueError(f"k must be an integer from 1 to n = {logits.shape[-1]}, got {k!r}")
        self.logits, self.k, self.temperature = logits, int(k), float(temperature)
        super().__init__(logits.shape[:-1], torch.Size((self.k,)), validate_args)
        if self._validate_args and logits.numel():
            check_numbers(logits, self.k)

    @property
    def arg_constraints(self) -> dict[str, constraints.Constraint]:
        return {}  # a logit may be -inf, which no constraint of torch allows: the constructor checks

    @constraints.dependent_property(is_discrete=True, event_dim=1)
    def support(self) -> constraints.Constraint:
        return constraints.independent(constraints.integer_interval(0, self.logits.shape[-1] - 1), 1)

    @torch.no_grad()
    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Class indices [sample_shape, ..., k], in the order in which they were drawn."""
        shape = torch.Size(sample_shape) + self.logits.shape
        x = self._x().expand(shape)
        # standard Gumbel; in half precision noise would be inf at times
        noise = -torch.empty(shape, dtype=wide(self.logits).dtype, device=x.device).exponential_().log()
        return (x + noise).topk(self.k).indices

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probability [...] of lists of class indices [..., k], first drawn first."""
        return self._log_prob(value).to(wide(self.logits).dtype)

    def set_log_prob(self, value: Tensor) -> Tensor:
        """Log-probability [...] of sets of class indices [..., k] in any order: a sum over k! orders, k up to 7."""
        if self.k > ORDER_LIMIT:
            raise ValueError(
                f"a set of {self.k} classes has {math.factorial(self.k)} orders: k may be up to {ORDER_LIMIT}"
            )
        orders = [self._log_prob(value[..., list(order)]) for order in permutations(range(self.k))]
        return torch.stack(orders).logsumexp(0).to(wide(self.logits).dtype)

    def _log_prob(self, value: Tensor) -> Tensor:
        x = self._x()
        shape = torch.broadcast_shapes(value.shape[:-1], x.shape[:-1])
        x, value = x.expand(*shape, -1), value.expand(*shape, -1)
        total = x.new_zeros(shape)
        for place in range(self.k):
            now = value[..., place : place + 1]
            total = total + (x.gather(-1, now)[..., 0] - x.logsumexp(-1))
            x = x.scatter(-1, now, -math.inf)
        return total

    def _x(self) -> Tensor:
        """logits / temperature [..., n] in double precision, from the largest of a row."""
        return scaled(self.logits, self.temperature, self.logits.detach().amax(-1, keepdim=True))
