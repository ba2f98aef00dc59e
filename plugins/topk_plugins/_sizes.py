"""Base class of losses with one or several values of k, and functions for these values and their weights."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from topk_registry import CommonOptions, TopKLoss
from topk_registry.checks import integer, number


class SeveralSizes(TopKLoss):
    """Base class of top-k losses with one value of k, or with several values and one weight per value.

    With several values, the loss combines one loss per value. ``sizes`` has all values of k with a positive weight, and
    ``shares`` has their weights, divided by the sum of the weights. The attribute ``k`` is the largest of the sizes.

    Args:
        k: number of classes that should include the label, at least 1, or several different such numbers.
        k_weights: one non-negative weight per value of k. None: equal weights.
        common: the options weight, reduction, label_smoothing and ignore_index of ``torch.nn.CrossEntropyLoss``.
    """

    sizes: tuple[int, ...]
    shares: tuple[float, ...]
    k_weights: Sequence[float] | None = None
    _given_k: int | Sequence[int] = 1

    def __init__(
        self, k: int | Sequence[int], k_weights: Sequence[float] | None, **common: Unpack[CommonOptions]
    ) -> None:
        super().__init__(**common)
        self.set_option("k", k)
        self.k_weights = k_weights

    def set_option(self, name: str, value: Any) -> None:
        if name not in ("k", "k_weights"):
            super().set_option(name, value)
            return
        given = {"k": self._given_k, "k_weights": self.k_weights, name: value}
        self.sizes, self.shares = set_sizes(**given)
        vars(self).update(k=max(self.sizes), k_weights=given["k_weights"], _given_k=given["k"])

    def given_options(self) -> dict[str, Any]:
        several = len(self.sizes) > 1
        k, k_weights = (list(self.sizes), list(self.shares)) if several else (self.k, None)
        return super().given_options() | {"k": k, "k_weights": k_weights}


def set_sizes(k: int | Sequence[int], k_weights: Sequence[float] | None) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Check the values of k and their weights, and return the values and the normalized weights.

    The result leaves out each value of k with weight 0. The remaining weights sum to 1.

    Example:
        >>> set_sizes([1, 5], [1, 3])
        ((1, 5), (0.25, 0.75))
    """
    sizes = [integer(one, "k", at_least=1) for one in _each(k)]
    if len(set(sizes)) < max(1, len(sizes)):
        raise ValueError(f"k must be an integer or a list of different integers, got {k!r}")
    given = [1.0] * len(sizes) if k_weights is None else k_weights
    weights = [number(one, "k_weights", at_least=0) for one in _each(given)]
    total = sum(weights)
    if len(weights) != len(sizes) or not 0 < total < float("inf"):
        raise ValueError(
            f"k_weights must hold one non-negative number for each value of k = {k!r}, and not only zeros, "
            f"got {k_weights!r}"
        )
    kept = [(size, weight / total) for size, weight in zip(sizes, weights, strict=True) if weight]
    return tuple(size for size, _ in kept), tuple(share for _, share in kept)


def _each(value: Any) -> Iterable[Any]:
    return value if isinstance(value, Iterable) and not isinstance(value, str) else [value]


def mixture_nll(losses: Tensor, shares: Sequence[float]) -> Tensor:
    """Return the negative log-likelihood of a mixture, -log sum_j P_j exp(-L_j), in the shape [...].

    L [J, ...] are the J ``losses``, which are negative log-likelihoods, and P [J] are their ``shares`` with the sum 1.
    Results near 0 are precise. Where all J losses are infinite, the result is infinite and its gradient is 0.
    """
    least = losses.detach().amin(0)
    share = torch.tensor(shares, dtype=losses.dtype, device=losses.device).view(-1, *(1 for _ in losses.shape[1:]))
    # for infinite losses, inf - inf would be NaN
    beyond = least == torch.inf
    below, losses = least.masked_fill(beyond, 0.0), losses.masked_fill(beyond, 0.0)
    return (below - torch.log1p((share * torch.expm1(below - losses)).sum(0))).masked_fill(beyond, torch.inf)
