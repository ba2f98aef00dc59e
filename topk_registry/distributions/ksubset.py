"""The probability distribution over sets of k classes. Top-k losses and :class:`TopKHead` use this distribution."""

import math
from itertools import combinations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Distribution, constraints, kl

from topk_registry.checks import number
from topk_registry.ops.backend import is_hidden
from topk_registry.ops.ksubset import graph

MAX_SUBSETS = 1_000_000  # maximum number of sets that enumerate_support returns


class _KHot(constraints.Constraint):
    is_discrete = True
    event_dim = 1

    def __init__(self, k: Tensor) -> None:
        self.k = k
        super().__init__()

    def check(self, value: Tensor) -> Tensor:
        return ((value == 0) | (value == 1)).all(-1) & (value.sum(-1) == self.k)


class KSubset(Distribution):
    r"""Probability distribution over the sets S that contain k of n classes.

    The probability P(S) is proportional to the product of exp(logit / temperature) over the classes in S. Let x =
    logits / temperature. Then

        log P(S) = sum_{i in S} x_i - log sigma_k(exp x).

    To compute sigma_k(e), take every set of k classes, multiply the entries of e in this set, and add up the products.
    sigma_k is called the k-th elementary symmetric polynomial.

    A set is a k-hot vector [..., n], with 1 for each class in the set and 0 elsewhere. :meth:`log_prob` also accepts
    sets as class indices [..., k].

    All methods compute in double precision and return results in the dtype of the logits. Exception: for logits in
    half precision, all results except sets are float32. :meth:`sample`, :meth:`log_prob` and :meth:`entropy` use
    O(n k) memory per row.

    Args:
        logits: tensor [..., n]. A class with the logit -inf is in no set. If exactly k logits of a row are above -inf,
            only one set is possible. Then the entropy is 0, and the row gets no gradient.
        k: number of classes in a set, 1 <= k < n: one number, or integers [...] with one number per row.
        temperature: positive number by which logits are divided.
        validate_args: whether to check arguments, and sets in :meth:`log_prob`. None: torch's default.

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
        return {}  # no constraint of PyTorch allows -inf, so the constructor checks the logits

    @constraints.dependent_property(is_discrete=True, event_dim=1)
    def support(self) -> constraints.Constraint:
        return _KHot(self.k)

    @property
    def marginals(self) -> Tensor:
        """For each class, the probability that the set contains the class: [..., n]. Each row sums to k.

        The marginals are differentiable and equal :func:`topk_registry.topk_marginals`.
        """
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
        """The most probable set as a k-hot vector [..., n]: the k largest logits. Ties go to the lower class index."""
        return _most_probable(self.logits, self.k)[0].to(self.logits.dtype)

    def log_partition(self) -> Tensor:
        """Return log Z: [...]. Z is the sum of exp(sum_{i in S} x_i) over all sets S, for x = logits / temperature.

        Z is the normalization constant of P(S). The gradient of log Z with respect to x is :attr:`marginals`.
        """
        x, in_mode = self._relative()
        of_mode = torch.where(in_mode, self.logits.double() / self.temperature, 0.0).sum(-1)
        return self._out(of_mode + _nll_of_mode(x, self.k, in_mode, self._one_k))

    def log_prob(self, value: Tensor) -> Tensor:
        """Return log P(S) for given sets S: [...].

        Args:
            value: k-hot vectors [..., n]. If ``k`` was passed as a number, class indices [..., k] are also allowed.
        """
        x, in_mode = self._relative()
        n, k = self.event_shape[0], self._one_k
        if not value.is_floating_point() and value.dtype != torch.bool and value.shape[-1] == k != n:
            ahead = self._sum_at(x, value) - torch.where(in_mode, x, 0.0).sum(-1)
        else:
            if self._validate_args:
                self._validate_sample(value)
            ahead = _inner(value.double() - in_mode.double(), x)
        return self._out(ahead - _nll_of_mode(x, self.k, in_mode, self._one_k))

    def entropy(self) -> Tensor:
        """Return the entropy of the distribution of each row: [...]."""
        return self._out(self._cross_entropy(self))

    @torch.no_grad()
    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw random sets, and return k-hot vectors: [sample_shape, ..., n]. The draws follow P(S) exactly."""
        sample_shape = torch.Size(sample_shape)
        rows = self._relative()[0].reshape(-1, self.event_shape[0])
        drawn = _sample(rows, self.k.reshape(-1), sample_shape.numel())
        return drawn.view(self._extended_shape(sample_shape)).to(self.logits.dtype)

    def sample_indices(self, sample_shape: Any = ()) -> Tensor:
        """Draw random sets, and return class indices in ascending order: [sample_shape, ..., k].

        If ``k`` was passed as a tensor, the method raises ValueError.
        """
        if self._one_k is None:
            raise ValueError("index sets need the same k for all rows: pass k as a number, or use sample()")
        drawn = self.sample(sample_shape)
        return drawn.nonzero()[:, -1].view(*drawn.shape[:-1], self._one_k)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draw random sets as :meth:`sample` does, but with a gradient.

        In the backward pass, the draw has the gradient of :attr:`marginals`, which are the probabilities that the set
        contains each class (straight-through). This gradient estimate is biased, but its variance is low.
        """
        pi = self.marginals
        return self.sample(sample_shape) + (pi - pi.detach())

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """Return all possible sets as k-hot vectors: [number of sets, ..., n].

        If ``k`` was passed as a tensor, or if there are more than 1,000,000 sets, the method raises ValueError. With
        ``expand=False``, all batch dimensions have size 1.
        """
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
        """For x = logits / temperature, return x minus the k-th largest x of the row, and a mask of the k largest x."""
        in_mode, kth = _most_probable(self.logits, self.k)
        return (self.logits.double() - kth.double()) / self.temperature, in_mode

    def _cross_entropy(self, drawn: "KSubset") -> Tensor:
        """Return -E log P(S): [...]. P is this distribution, and S is a random set from the distribution ``drawn``."""
        x, in_mode = self._relative()
        own = x if drawn is self else drawn._relative()[0]
        log_odds = _by_size(graph.log_odds, own, drawn.k, drawn._one_k)
        # pi - 1 for classes in the mode, and pi for other classes; sigmoid avoids the cancellation of 1 - pi
        beyond = torch.where(in_mode, -torch.sigmoid(-log_odds), torch.sigmoid(log_odds))
        return _nll_of_mode(x, self.k, in_mode, self._one_k) - _inner(beyond, x)

    def _out(self, result: Tensor) -> Tensor:
        return result.to(torch.promote_types(self.logits.dtype, torch.float32))

    def _sum_at(self, x: Tensor, value: Tensor) -> Tensor:
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
    if p.event_shape != q.event_shape or bool((p.k != q.k).any()):
        raise ValueError(f"both need the same n and k, got {p.event_shape[0]}, {p.k} and {q.event_shape[0]}, {q.k}")
    divergence = q._cross_entropy(p) - p._cross_entropy(p)
    return divergence.to(torch.promote_types(p._out(divergence).dtype, q._out(divergence).dtype))


def _most_probable(logits: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return whether each class is in the most probable set [..., n], and the smallest logit of this set [..., 1]."""
    ordered, order = logits.detach().sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    in_mode = torch.zeros_like(order).scatter(-1, order, rank) < k[..., None]
    least = ordered.gather(-1, k[..., None] - 1)
    return in_mode, torch.where(least.isinf(), 0.0, least)


def _by_size(function: Any, x: Tensor, k: Tensor, one_k: int | None) -> Tensor:
    """Return ``function(rows, k)`` for all rows of x: [..., n]. Rows with the same k share one call.

    If the user passed k as a number, ``one_k`` is this number. Otherwise, ``one_k`` is None.
    """
    rows = x.reshape(-1, x.shape[-1])
    if one_k is not None or k.is_meta:
        return function(rows, one_k or 1).view(x.shape)
    sizes, out = k.reshape(-1), torch.zeros_like(rows)
    for size in sizes.unique().tolist():
        chosen = (sizes == size).nonzero()[:, 0]
        out = out.index_copy(0, chosen, function(rows[chosen], size))
    return out.view(x.shape)


def _inner(weight: Tensor, x: Tensor) -> Tensor:
    """Return sum_i weight_i x_i: [...]. A class with weight 0 contributes 0, even if x_i is -inf."""
    return (weight * x.masked_fill((weight == 0) & (x == -torch.inf), 0.0)).sum(-1)


def _nll_of_mode(x: Tensor, k: Tensor, in_mode: Tensor, one_k: int | None) -> Tensor:
    """For logits x [..., n], return -log P(S) of the most probable set S: [...]. ``in_mode`` marks the classes in S."""
    n = x.shape[-1]  # the terms of log P(S) can be large and nearly equal, so their difference would be imprecise
    largest = one_k or (n - 1 if is_hidden(k) else int(k.max()) if k.numel() else 1)
    rows, sizes = x.reshape(-1, n), k.reshape(-1)
    levels, u = _tree(rows, sizes, largest)
    drawn = levels[-1][..., 0].gather(0, sizes[None])[0]  # probability of drawing k classes
    # a class in the most probable set contributes log(1 + e^u) - u, and any other class contributes log(1 + e^u)
    rest = F.softplus(torch.where(in_mode.reshape(-1, n), -u, u), threshold=40.0).sum(-1)
    certain = (rows > -torch.inf).sum(-1) <= sizes
    return torch.where(certain, 0.0, drawn.log() + rest).view(x.shape[:-1])


def _tree(x: Tensor, k: Tensor, largest: int) -> tuple[list[Tensor], Tensor]:
    """Return the levels of a binary tree whose leaves are the classes, and a number u_i for each class i.

    For logits x, u_i is x_i - t, with one number t per row. Suppose that each class i is drawn independently with
    probability sigmoid(u_i). If exactly k classes are drawn, the set of drawn classes has the distribution of
    :class:`KSubset` for every t. This function chooses t such that drawing k classes is likely. A tree node holds the
    probabilities that 0, 1, ..., ``largest`` leaves below it are drawn. ``largest`` is the largest k of all rows.
    """
    t = graph.tilt_to_mean(x.detach(), torch.zeros_like(x[:, :1]), k[:, None])
    u = x - t
    return graph.product_tree(torch.stack((torch.sigmoid(-u), torch.sigmoid(u))), largest), u


def _sample(x: Tensor, k: Tensor, count: int) -> Tensor:
    """Draw ``count`` sets per row, and return whether each class is in the set: bool [count, B, n].

    Each node of :func:`_tree` has a number of classes to draw: k for the root. From the root to the leaves, the number
    of a node is divided at random between the two children of the node.
    """
    levels, _ = _tree(x, k, int(k.max()) if k.numel() else 1)
    drawn = k.expand(count, -1)[..., None]  # [count, B, nodes]
    for level in reversed(levels[:-1]):
        half = -(-level.shape[-1] // 2)
        left, right = level[..., :half], level[..., half:]  # [degrees, B, nodes]
        if right.shape[-1] < half:  # for an odd number of nodes, add a node without classes: 0 draws have probability 1
            one = torch.zeros_like(left[..., :1])
            one[0] = 1.0
            right = torch.cat((right, one), -1)
        degrees = torch.arange(len(left), device=x.device)[:, None, None, None]
        others = drawn - degrees  # [degrees, count, B, nodes]: number of draws of the right child
        possible = (others >= 0) & (others < len(right))
        cumulative = right[:, None].expand(-1, count, -1, -1).gather(0, others.clamp(0, len(right) - 1))
        cumulative = torch.where(possible, cumulative * left[:, None], 0.0).cumsum(0)
        uniform = torch.rand(drawn.shape, dtype=x.dtype, device=x.device)
        # the first number of draws whose cumulative probability exceeds uniform * total; its probability is above 0
        ours = (cumulative <= uniform * cumulative[-1]).sum(0).clamp(max=len(left) - 1)
        drawn = torch.cat((ours, drawn - ours), -1)[..., : level.shape[-1]]
    return drawn.bool()
