"""The distribution over sets of k classes behind the top-k losses and the prediction head."""

import math
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints, kl

from topk_registry.distributions import relative, tree
from topk_registry.distributions.scores import check_numbers, check_scores, scaled
from topk_registry.ops.targets.table import wide
from topk_registry.ops.tensors import is_hidden

SUPPORT_LIMIT = 1_000_000  # subsets that enumerate_support makes at most


class _KHot(constraints.Constraint):
    """Vectors of n zeros and ones with k ones; k is one number, or one a row."""

    is_discrete = True
    event_dim = 1

    def __init__(self, k: Tensor) -> None:
        self.k = k
        super().__init__()

    def check(self, value: Tensor) -> Tensor:
        return ((value == 0) | (value == 1)).all(-1) & (value.sum(-1) == self.k)


class KSubset(Distribution):
    r"""Sets of k of n classes, drawn with probability proportional to prod_{i in S} exp(logits_i / temperature).

    With x = logits / temperature and sigma_k the k-th elementary symmetric polynomial of exp(x),

        log P(S) = sum_{i in S} x_i - log sigma_k(exp x).

    Its marginals are those of :func:`topk_marginals`. Values are k-hot vectors [..., n] in the dtype of the logits;
    :meth:`log_prob` takes sets of class indices [..., k] too. Sampling, ``log_prob`` and ``entropy`` build a tree of
    O(n k) numbers a row in double precision; marginals cost what :func:`topk_marginals` costs. Results are in single
    precision for logits in half precision.

    Args:
        logits: scores [..., n]; a class with -inf is in no set. Where a row has only k other classes, their set is
            certain: its entropy is 0, and no gradient reaches the row.
        k: size of the sets, 1 <= k < n: one number, or integers [...], one a row.
        temperature: divides the logits.
        validate_args: check arguments and values; torch's default where None.

    Example:
        >>> distribution = KSubset(torch.zeros(4), 2)
        >>> distribution.log_prob(torch.tensor([0, 3])).exp()  # one of six sets
        tensor(0.1667)
        >>> distribution.marginals
        tensor([0.5000, 0.5000, 0.5000, 0.5000])

    Reference:
        Chen, Dempster, Liu. Weighted finite population sampling to maximize entropy. Biometrika 1994. Ahmed, Zeng,
        Niepert, Van den Broeck. SIMPLE: A gradient estimator for k-subset sampling. ICLR 2023 (``rsample``).
    """

    has_enumerate_support = True
    has_rsample = True

    logits: Tensor
    k: Tensor
    temperature: float

    def __init__(
        self, logits: Tensor, k: int | Tensor, temperature: float = 1.0, validate_args: bool | None = None
    ) -> None:
        check_scores(logits, temperature)
        n, shape = logits.shape[-1], logits.shape[:-1]
        size = torch.as_tensor(k, device=logits.device)
        if size.is_floating_point() or size.dtype == torch.bool:
            raise ValueError(f"k must be an integer, or integers {list(shape)}, got {k!r}")
        self._one_k = int(k) if not isinstance(k, Tensor) else None
        try:
            self.k = size.long().expand(shape)
        except RuntimeError:
            raise ValueError(f"k must be one number, or one a row {list(shape)}, got {list(size.shape)}") from None
        if self.k.numel() and not is_hidden(self.k) and not (int(self.k.min()) >= 1 and int(self.k.max()) < n):
            raise ValueError(f"k must be from 1 to n - 1 = {n - 1}, got {k!r}")
        self.logits, self.temperature = logits, float(temperature)
        super().__init__(shape, torch.Size((n,)), validate_args)
        if self._validate_args and logits.numel():
            check_numbers(logits, self.k)

    @property
    def arg_constraints(self) -> dict[str, constraints.Constraint]:
        return {}  # a logit may be -inf, which no constraint of torch allows: the constructor checks

    @constraints.dependent_property(is_discrete=True, event_dim=1)
    def support(self) -> constraints.Constraint:
        return _KHot(self.k)

    @property
    def x(self) -> Tensor:
        """logits / temperature [..., n], in at least single precision."""
        return wide(self.logits) / self.temperature

    @property
    def marginals(self) -> Tensor:
        """Probability of each class to be in the set [..., n]; each row sums to its k. Differentiable."""
        return relative.marginals(self.logits, self.k, self._one_k, self.temperature)

    @property
    def mean(self) -> Tensor:
        return self.marginals

    @property
    def variance(self) -> Tensor:
        pi = self.marginals
        return pi * (1 - pi)

    @property
    def mode(self) -> Tensor:
        """The most probable set: the k largest logits, ties by the lower index."""
        return relative.most_probable(self.logits, self.k)[0].to(self.logits.dtype)

    def log_partition(self) -> Tensor:
        """log sigma_k(exp x) [...], whose gradient to x are the marginals."""
        x, in_mode = self._centred()
        of_mode = torch.where(in_mode, self.logits.double() / self.temperature, 0.0).sum(-1)
        return self._out(of_mode + relative.excess(x, self.k, in_mode, self._one_k))

    def log_prob(self, value: Tensor) -> Tensor:
        """log P(S) of k-hot vectors [..., n], or of class indices [..., k] where all rows have one k."""
        x, in_mode = self._centred()
        if _is_indices(value, self._one_k, self.event_shape[0]):
            ahead = self._of_indices(x, value) - torch.where(in_mode, x, 0.0).sum(-1)
        else:
            if self._validate_args:
                self._validate_sample(value)
            ahead = relative.inner(value.double() - in_mode.double(), x)
        return self._out(ahead - relative.excess(x, self.k, in_mode, self._one_k))

    def entropy(self) -> Tensor:
        """log sigma_k - sum_i pi_i x_i [...]."""
        return self._out(self._surprise_of(self))

    def covariance_vector_product(self, v: Tensor) -> Tensor:
        """Covariance of the k-hot vector times v [..., n]: the Jacobian of the marginals to x, which is symmetric."""
        with torch.enable_grad():
            x = self.x.detach().requires_grad_()
            pi = relative.marginals(x, self.k, self._one_k, 1.0)
            (product,) = torch.autograd.grad(pi, x, v.to(pi.dtype).expand(pi.shape))
        return product

    @torch.no_grad()
    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Exact draws as k-hot vectors [sample_shape, ..., n]."""
        sample_shape = torch.Size(sample_shape)
        rows = self._centred()[0].reshape(-1, self.event_shape[0])
        drawn = tree.sample(rows, self.k.reshape(-1), sample_shape.numel())
        return drawn.view(self._extended_shape(sample_shape)).to(self.logits.dtype)

    def sample_indices(self, sample_shape: Any = ()) -> Tensor:
        """Exact draws as class indices [sample_shape, ..., k] in ascending order, where all rows have one k."""
        if self._one_k is None:
            raise ValueError("index sets need one k for all rows: give k as a number, or use sample()")
        drawn = self.sample(sample_shape)
        return drawn.nonzero()[:, -1].view(*drawn.shape[:-1], self._one_k)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Exact draws whose gradient is that of the marginals (straight-through): biased, of low variance."""
        pi = self.marginals
        return self.sample(sample_shape) + (pi - pi.detach())

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """All sets as k-hot vectors [C(n, k), ..., n], where all rows have one k and C(n, k) is small."""
        n = self.event_shape[0]
        if self._one_k is None:
            raise ValueError("the supports of rows with different k differ: give k as a number")
        if math.comb(n, self._one_k) > SUPPORT_LIMIT:
            raise ValueError(f"there are {math.comb(n, self._one_k)} sets, more than {SUPPORT_LIMIT}")
        sets = torch.tensor(list(combinations(range(n), self._one_k)), device=self.logits.device)
        hot = torch.zeros(len(sets), n, dtype=self.logits.dtype, device=self.logits.device).scatter_(1, sets, 1.0)
        hot = hot.view(len(sets), *(1 for _ in self.batch_shape), n)
        return hot.expand(len(sets), *self.batch_shape, n) if expand else hot

    def expand(self, batch_shape: Any, _instance: Any = None) -> Any:
        new: Any = self._get_checked_instance(KSubset, _instance)
        batch_shape = torch.Size(batch_shape)
        new.logits, new.k = self.logits.expand(*batch_shape, -1), self.k.expand(batch_shape)
        new.temperature, new._one_k = self.temperature, self._one_k
        Distribution.__init__(new, batch_shape, self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    def _centred(self) -> tuple[Tensor, Tensor]:
        """logits / temperature [..., n] in double precision from the k-th largest, and the k largest as booleans."""
        in_mode, least = relative.most_probable(self.logits, self.k)
        return scaled(self.logits, self.temperature, least), in_mode

    def _surprise_of(self, drawn: "KSubset") -> Tensor:
        """-E log P(S) [...] of this distribution for sets that another one draws: the cross-entropy of the two."""
        x, in_mode = self._centred()
        own = x if drawn is self else drawn._centred()[0]
        pi = relative.beyond(relative.log_odds(own, drawn.k, drawn._one_k), in_mode)
        return relative.excess(x, self.k, in_mode, self._one_k) - relative.inner(pi, x)

    def _out(self, nats: Tensor) -> Tensor:
        return nats.to(wide(self.logits).dtype)

    def _of_indices(self, x: Tensor, value: Tensor) -> Tensor:
        """Sum [...] of x [..., n] over classes [..., k]."""
        n = self.event_shape[0]
        if self._validate_args and value.numel():
            low, high = int(value.min()), int(value.max())
            if low < 0 or high >= n:
                raise ValueError(f"class indices must be in [0, {n - 1}], got {low if low < 0 else high}")
            in_order = value.sort(-1).values
            if bool((in_order[..., 1:] == in_order[..., :-1]).any()):
                raise ValueError("a set of class indices names a class twice")
        shape = torch.broadcast_shapes(value.shape[:-1], self.batch_shape)
        return x.expand(*shape, n).gather(-1, value.expand(*shape, -1)).sum(-1)


def _is_indices(value: Tensor, k: int | None, n: int) -> bool:
    return not value.is_floating_point() and value.dtype != torch.bool and value.shape[-1] == k and k != n


@kl.register_kl(KSubset, KSubset)
def _kl_ksubset_ksubset(p: KSubset, q: KSubset) -> Tensor:
    """sum_i pi_i (x_i - y_i) - log sigma_k(exp x) + log sigma_k(exp y), for sets of one size."""
    if p.event_shape != q.event_shape or bool((p.k != q.k).any()):
        raise ValueError(f"both need the same n and k, got {p.event_shape[0]}, {p.k} and {q.event_shape[0]}, {q.k}")
    divergence = q._surprise_of(p) - p._surprise_of(p)
    return divergence.to(torch.promote_types(wide(p.logits).dtype, wide(q.logits).dtype))
