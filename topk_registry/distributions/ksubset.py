"""The distribution over sets of k classes. The top-k losses and the prediction head are based on this distribution."""

import math
from itertools import combinations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Distribution, constraints, kl

from topk_registry.ops.ksubset import graph
from topk_registry.ops.tensors import is_hidden
from topk_registry.ops.values import number

MAX_SUBSETS = 1_000_000  # limit of enumerate_support


class _KHot(constraints.Constraint):
    """Constraint for vectors of n zeros and ones with k ones, where k is one number, or one number per row."""

    is_discrete = True
    event_dim = 1

    def __init__(self, k: Tensor) -> None:
        self.k = k
        super().__init__()

    def check(self, value: Tensor) -> Tensor:
        return ((value == 0) | (value == 1)).all(-1) & (value.sum(-1) == self.k)


class KSubset(Distribution):
    r"""Distribution over sets S of k of n classes, P(S) proportional to prod_{i in S} exp(logits_i / temperature).

    Let x = logits / temperature, and let sigma_k be the k-th elementary symmetric polynomial. Then

        log P(S) = sum_{i in S} x_i - log sigma_k(exp x).

    The marginals equal :func:`topk_registry.topk_marginals`. Values are k-hot vectors [..., n] in the dtype of the
    logits. :meth:`log_prob` also takes sets of class indices [..., k]. All methods compute in double precision.
    Sampling, ``log_prob`` and ``entropy`` use O(n k) memory per row. For logits in half precision, results are in
    single precision.

    Args:
        logits: scores [..., n]. A class with -inf is in no set. If only k classes of a row are above -inf, there is
            only one set: the entropy is 0, and the row gets no gradient.
        k: size of the sets, 1 <= k < n: one number, or integers [...], one per row.
        temperature: number by which logits are divided.
        validate_args: check arguments and values. None: the default of torch.

    Example:
        >>> distribution = KSubset(torch.zeros(4), 2)
        >>> distribution.log_prob(torch.tensor([0, 3])).exp()  # six sets, all equally likely
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
        if not isinstance(logits, Tensor) or not logits.is_floating_point() or logits.ndim < 1:
            got = f"{logits.dtype} {list(logits.shape)}" if isinstance(logits, Tensor) else repr(logits)
            raise ValueError(f"logits must be floating point [..., n], got {got}")
        n, shape = logits.shape[-1], logits.shape[:-1]
        size = torch.as_tensor(k, device=logits.device)
        if size.is_floating_point() or size.dtype == torch.bool:
            raise ValueError(f"k must be an integer, or integers {list(shape)}, got {k!r}")
        self._one_k = int(k) if not isinstance(k, Tensor) else None
        try:
            self.k = size.long().expand(shape)
        except RuntimeError:
            raise ValueError(f"k must be one number, or one per row {list(shape)}, got {list(size.shape)}") from None
        if self.k.numel() and not is_hidden(self.k) and not (int(self.k.min()) >= 1 and int(self.k.max()) < n):
            raise ValueError(f"k must be from 1 to n - 1 = {n - 1}, got {k!r}")
        self.logits, self.temperature = logits, number(temperature, "temperature", above=0)
        super().__init__(shape, torch.Size((n,)), validate_args)
        if self._validate_args and logits.numel():
            few = (logits > -math.inf).sum(-1) < self.k
            if bool(few.any()) or bool((logits == math.inf).any()) or bool(logits.isnan().any()):
                raise ValueError("every row needs k logits above -inf and no logit that is inf or NaN")

    @property
    def arg_constraints(self) -> dict[str, constraints.Constraint]:
        return {}  # no constraint of torch allows -inf, so the constructor checks logits

    @constraints.dependent_property(is_discrete=True, event_dim=1)
    def support(self) -> constraints.Constraint:
        return _KHot(self.k)

    @property
    def marginals(self) -> Tensor:
        """Probability that each class is in the set [..., n]. The sum of each row is the row's k. Differentiable."""
        x = self._relative()[0]
        return self._out(_by_size(graph.marginals, x, self.k, self._one_k))

    @property
    def mean(self) -> Tensor:
        return self.marginals

    @property
    def variance(self) -> Tensor:
        pi = self.marginals
        return pi * (1 - pi)

    @property
    def mode(self) -> Tensor:
        """Most probable set: the classes with the k largest logits. Of equal logits, the lower index comes first."""
        return _most_probable(self.logits, self.k)[0].to(self.logits.dtype)

    def log_partition(self) -> Tensor:
        """Return log sigma_k(exp x) [...]. Its gradient with respect to x is the marginals."""
        x, in_mode = self._relative()
        of_mode = torch.where(in_mode, self.logits.double() / self.temperature, 0.0).sum(-1)
        return self._out(of_mode + _excess(x, self.k, in_mode, self._one_k))

    def log_prob(self, value: Tensor) -> Tensor:
        """Return log P(S) of k-hot vectors [..., n], or of class indices [..., k] if all rows have the same k."""
        x, in_mode = self._relative()
        n, k = self.event_shape[0], self._one_k
        if not value.is_floating_point() and value.dtype != torch.bool and value.shape[-1] == k != n:
            ahead = self._sum_at(x, value) - torch.where(in_mode, x, 0.0).sum(-1)
        else:
            if self._validate_args:
                self._validate_sample(value)
            ahead = _inner(value.double() - in_mode.double(), x)
        return self._out(ahead - _excess(x, self.k, in_mode, self._one_k))

    def entropy(self) -> Tensor:
        """Return the entropy log sigma_k - sum_i pi_i x_i [...]."""
        return self._out(self._cross_entropy(self))

    @torch.no_grad()
    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Return exact draws as k-hot vectors [sample_shape, ..., n]."""
        sample_shape = torch.Size(sample_shape)
        rows = self._relative()[0].reshape(-1, self.event_shape[0])
        drawn = _sample(rows, self.k.reshape(-1), sample_shape.numel())
        return drawn.view(self._extended_shape(sample_shape)).to(self.logits.dtype)

    def sample_indices(self, sample_shape: Any = ()) -> Tensor:
        """Return exact draws as class indices [sample_shape, ..., k] in ascending order. All rows need the same k."""
        if self._one_k is None:
            raise ValueError("index sets need the same k for all rows: pass k as a number, or use sample()")
        drawn = self.sample(sample_shape)
        return drawn.nonzero()[:, -1].view(*drawn.shape[:-1], self._one_k)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Return exact draws with the gradient of the marginals (straight-through): a biased gradient, low variance."""
        pi = self.marginals
        return self.sample(sample_shape) + (pi - pi.detach())

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """Return all sets as k-hot vectors [C(n, k), ..., n]. All rows need the same k, and C(n, k) must be small."""
        n, k = self.event_shape[0], self._one_k
        if k is None:
            raise ValueError("rows with different k have different supports: pass k as a number")
        if math.comb(n, k) > MAX_SUBSETS:
            raise ValueError(f"there are {math.comb(n, k)} sets, more than {MAX_SUBSETS}")
        sets = torch.tensor(list(combinations(range(n), k)), device=self.logits.device)
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

    def _relative(self) -> tuple[Tensor, Tensor]:
        """Return logits / temperature [..., n] minus the k-th largest, and whether each class is in the mode."""
        in_mode, kth = _most_probable(self.logits, self.k)
        return (self.logits.double() - kth.double()) / self.temperature, in_mode

    def _cross_entropy(self, drawn: "KSubset") -> Tensor:
        """Return -E log P(S) [...]. P is this distribution, and the sets S come from the distribution ``drawn``."""
        x, in_mode = self._relative()
        own = x if drawn is self else drawn._relative()[0]
        log_odds = _by_size(graph.log_odds, own, drawn.k, drawn._one_k)
        # pi - 1 for classes of the mode and pi for other classes: no cancellation
        beyond = torch.where(in_mode, -torch.sigmoid(-log_odds), torch.sigmoid(log_odds))
        return _excess(x, self.k, in_mode, self._one_k) - _inner(beyond, x)

    def _out(self, result: Tensor) -> Tensor:
        return result.to(torch.promote_types(self.logits.dtype, torch.float32))

    def _sum_at(self, x: Tensor, value: Tensor) -> Tensor:
        """Return the sum [...] of the entries of x [..., n] at classes [..., k]."""
        n = self.event_shape[0]
        if self._validate_args and value.numel():
            low, high = int(value.min()), int(value.max())
            if low < 0 or high >= n:
                raise ValueError(f"class indices must be in [0, {n - 1}], got {low if low < 0 else high}")
            in_order = value.sort(-1).values
            if bool((in_order[..., 1:] == in_order[..., :-1]).any()):
                raise ValueError("a set of class indices contains a class twice")
        shape = torch.broadcast_shapes(value.shape[:-1], self.batch_shape)
        return x.expand(*shape, n).gather(-1, value.expand(*shape, -1)).sum(-1)


@kl.register_kl(KSubset, KSubset)
def _kl_ksubset_ksubset(p: KSubset, q: KSubset) -> Tensor:
    """Return sum_i pi_i (x_i - y_i) - log sigma_k(exp x) + log sigma_k(exp y)."""
    if p.event_shape != q.event_shape or bool((p.k != q.k).any()):
        raise ValueError(f"both need the same n and k, got {p.event_shape[0]}, {p.k} and {q.event_shape[0]}, {q.k}")
    divergence = q._cross_entropy(p) - p._cross_entropy(p)
    return divergence.to(torch.promote_types(p._out(divergence).dtype, q._out(divergence).dtype))


def _most_probable(logits: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return whether each class is in the mode [..., n], and the mode's smallest logit. Ties go to the lower index."""
    ordered, order = logits.detach().sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    in_mode = torch.zeros_like(order).scatter(-1, order, rank) < k[..., None]
    least = ordered.gather(-1, k[..., None] - 1)
    return in_mode, torch.where(least.isinf(), 0.0, least)


def _by_size(function: Any, x: Tensor, k: Tensor, one_k: int | None) -> Tensor:
    """Return ``function(rows, k)`` for all rows of x [..., n]. The function is called once per set size."""
    rows = x.reshape(-1, x.shape[-1])
    if one_k is not None or k.is_meta:
        return function(rows, one_k or 1).view(x.shape)
    sizes, out = k.reshape(-1), torch.zeros_like(rows)
    for size in sizes.unique().tolist():
        chosen = (sizes == size).nonzero()[:, 0]
        out = out.index_copy(0, chosen, function(rows[chosen], size))
    return out.view(x.shape)


def _inner(weight: Tensor, x: Tensor) -> Tensor:
    """Return sum_i weight_i x_i [...]. A class of weight 0 changes neither sum nor gradient, even if x_i is -inf."""
    return (weight * x.masked_fill((weight == 0) & (x == -torch.inf), 0.0)).sum(-1)


def _excess(x: Tensor, k: Tensor, in_mode: Tensor, one_k: int | None) -> Tensor:
    """Return log sigma_k(exp x) - sum of x over the mode [...]. The result is at least 0.

    Probabilities and entropies are computed relative to the mode to avoid cancellation.
    """
    n = x.shape[-1]
    largest = one_k or (n - 1 if is_hidden(k) else int(k.max()) if k.numel() else 1)
    rows, sizes = x.reshape(-1, n), k.reshape(-1)
    levels, u = _tree(rows, sizes, largest)
    drawn = levels[-1][..., 0].gather(0, sizes[None])[0]  # probability of drawing k classes
    # a class in the mode contributes log(1 + e^u) - u
    rest = F.softplus(torch.where(in_mode.reshape(-1, n), -u, u), threshold=40.0).sum(-1)
    certain = (rows > -torch.inf).sum(-1) <= sizes
    return torch.where(certain, 0.0, drawn.log() + rest).view(x.shape[:-1])


def _tree(x: Tensor, k: Tensor, largest: int) -> tuple[list[Tensor], Tensor]:
    """Return the distribution of the number of drawn classes below each node of a binary tree, and log-odds u [B, n].

    Each class is drawn independently with probability sigmoid(u_i), where u = x - t. Conditional on k drawn classes in
    total, the drawn set has the k-subset distribution, for any shift t.
    """
    t = graph.tilt_to_mean(x.detach(), torch.zeros_like(x[:, :1]), k[:, None])
    u = x - t
    return graph.product_tree(torch.stack((torch.sigmoid(-u), torch.sigmoid(u))), largest), u


def _sample(x: Tensor, k: Tensor, count: int) -> Tensor:
    """Return exact draws [count, B, n] as booleans, by dividing the count of each tree node between its children."""
    levels, _ = _tree(x, k, int(k.max()) if k.numel() else 1)
    drawn = k.expand(count, -1)[..., None]  # [count, B, nodes]
    for level in reversed(levels[:-1]):
        half = -(-level.shape[-1] // 2)
        left, right = level[..., :half], level[..., half:]  # [degrees, B, nodes]
        if right.shape[-1] < half:  # for an odd number of nodes, pad with the polynomial 1
            one = torch.zeros_like(left[..., :1])
            one[0] = 1.0
            right = torch.cat((right, one), -1)
        degrees = torch.arange(len(left), device=x.device)[:, None, None, None]
        others = drawn - degrees  # [degrees, count, B, nodes]: count of the right child
        possible = (others >= 0) & (others < len(right))
        cumulative = right[:, None].expand(-1, count, -1, -1).gather(0, others.clamp(0, len(right) - 1))
        cumulative = torch.where(possible, cumulative * left[:, None], 0.0).cumsum(0)
        uniform = torch.rand(drawn.shape, dtype=x.dtype, device=x.device)
        # first degree whose cumulative probability exceeds u times the total: never a degree of probability 0
        ours = (cumulative <= uniform * cumulative[-1]).sum(0).clamp(max=len(left) - 1)
        drawn = torch.cat((ours, drawn - ours), -1)[..., : level.shape[-1]]
    return drawn.bool()
