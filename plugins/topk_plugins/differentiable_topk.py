r"""Differentiable top-k classification: the likelihood that the label is among the first k of a relaxed ranking.

A relaxed ranking is a matrix P [n, n]. Row r has the probability of each class to have rank r. With a weight P_K(k) for
each k, the loss is

    L = -log sum_k P_K(k) sum_{r <= k} P[r, y].

By default, the first row for k = 1 is replaced by softmax, as in the authors' code. Only the highest scores and the
label are ranked.
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from typing_extensions import Unpack

from topk_plugins._relaxations import NETWORKS, RELAXATIONS, log_probabilities, network, rank_logits
from topk_plugins._rows import nan_if_invalid
from topk_plugins._sizes import SeveralSizes, set_sizes
from topk_registry import CommonOptions
from topk_registry.options import choice, integer, number

ROWS = 1 << 14  # number of rows per block if a network runs once per class
FEWEST = 16  # minimum number of candidates, as in the paper
LEAST = -1e30  # replaces -inf, because inf - inf is NaN


class Ranking(NamedTuple):
    """Parameters of a relaxed ranking and the weight of each rank in the likelihood."""

    weights: tuple[float, ...]  # weight of softmax, then of ranks 1, 2, ...
    k: int  # at least k + 1 scores must be above -inf
    relaxation: str
    tau: float
    swap: str
    candidates: int | None

    @property
    def ranks(self) -> int:
        return len(self.weights) - 1


class DifferentiableTopK(SeveralSizes):
    r"""Top-k classification loss over a relaxed ranking, for one k or several.

    .. math:: L(s, y) = -\log \sum_j P_j \sum_{r \le k_j} P_{r y}

    Use when:
        You train for several k at once, or compare relaxations of a ranking. Implementation of the paper; not evaluated
        here.

    Avoid when:
        ``candidates`` is None with many classes, or a sorting network gets soft targets (mixup, CutMix, label
        smoothing). Both are many times slower. ``topk_nll`` also takes several k and is an exact likelihood.

    Args:
        k: size of the set that should contain the label, 1 <= k <= n - 1, or several sizes.
        k_weights: weight of each k; they are divided by their sum. None: equal weights.
        relaxation: ``"neuralsort"``, ``"softsort"``, ``"odd_even"`` or ``"bitonic"``. The last two are sorting networks
            with soft swaps.
        tau: temperature of the relaxation, positive. As tau goes to 0, the ranking becomes hard.
        swap: distribution function that maps the difference of two scores to the probability of a swap in a sorting
            network: ``"cauchy"`` or ``"logistic"``.
        candidates: number of classes that are ranked: the label and the highest other scores. All other classes are
            excluded, from the softmax too. The number must exceed every k. None ranks all classes, which costs O(n^3)
            with a sorting network. ``"auto"`` is the larger of 16 and 2 k + 2 for the largest k; if the only k is 1 and
            ``top1`` is ``"softmax"``, ``"auto"`` is None and the loss is cross-entropy.
        top1: source of the probabilities for k = 1: ``"softmax"``, or ``"sort"`` for the first row of the ranking.
        common: weight, reduction, label_smoothing, ignore_index, as in ``torch.nn.CrossEntropyLoss``.

    For soft targets, the loss is computed for each class as the label. NeuralSort and SoftSort rank once for all
    classes. A sorting network runs once per class.

    Example:
        >>> DifferentiableTopK(k=[1, 3])(torch.zeros(1, 4), torch.tensor([0]))
        tensor(0.6931)

    Reference: Petersen, Kuehne, Borgelt, Deussen. Differentiable Top-k Classification Learning. ICML 2022. Relaxations:
    Grover, Wang, Zweig, Ermon 2019 (NeuralSort); Prillo, Eisenschlos 2020 (SoftSort); Petersen, Borgelt, Kuehne,
    Deussen 2022, Monotonic Differentiable Sorting Networks.
    """

    option_ranges: ClassVar = {
        "relaxation": RELAXATIONS,
        "tau": "(0, inf)",
        "swap": ("cauchy", "logistic"),
        "top1": ("softmax", "sort"),
    }
    tuning_grid: ClassVar = {"tau": (0.1, 0.3, 1.0)}

    candidates: int | None

    def __init__(
        self,
        k: int | Sequence[int] = 5,
        *,
        k_weights: Sequence[float] | None = None,
        relaxation: str = "neuralsort",
        tau: float = 1.0,
        swap: str = "cauchy",
        candidates: int | str | None = "auto",
        top1: str = "softmax",
        **common: Unpack[CommonOptions],
    ) -> None:
        self._candidates, self.top1 = candidates, choice(top1, "top1", ("softmax", "sort"))
        super().__init__(k, k_weights, **common)
        self.relaxation = choice(relaxation, "relaxation", RELAXATIONS)
        self.tau, self.swap = number(tau, "tau", above=0), choice(swap, "swap", ("cauchy", "logistic"))

    def take_sizes(self, k: int | Sequence[int], k_weights: Sequence[float] | None) -> None:
        """Check and store set sizes and their weights; update ``candidates``, which may depend on the largest size."""
        candidates = _number_of(self._candidates, max(set_sizes(k, k_weights)[0]), self.top1)
        super().take_sizes(k, k_weights)
        vars(self)["candidates"] = candidates

    def set_option(self, name: str, value: Any) -> None:
        if name == "candidates" and "_given" in vars(self):
            vars(self).update(candidates=_number_of(value, self.k, self.top1), _candidates=value)
            return
        super().set_option(name, value)
        if name == "top1" and "_given" in vars(self):
            vars(self)["candidates"] = _number_of(self._candidates, self.k, self.top1)

    def ranking(self) -> Ranking:
        """Return the ranking with the weight of each rank r: the sum of the weights of all k_j >= r."""
        softmax = self.top1 == "softmax"
        ranked = [(k, share) for k, share in zip(self.sizes, self.shares, strict=True) if k > 1 or not softmax]
        first = sum(share for k, share in zip(self.sizes, self.shares, strict=True) if k == 1 and softmax)
        most = max((k for k, _ in ranked), default=0)
        ranks = (float(sum(share for k, share in ranked if k >= r)) for r in range(1, most + 1))
        return Ranking((float(first), *ranks), self.k, self.relaxation, self.tau, self.swap, self.candidates)

    @property
    def _is_cross_entropy(self) -> bool:
        return self.k == 1 and self.top1 == "softmax" and self.candidates is None

    def per_label(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self._is_cross_entropy:
            return F.cross_entropy(logits, labels, reduction="none")
        ranking = self.ranking()
        # if a network ranks all classes, scores keep the order of the classes, because the result depends on the order
        of_label = _of_network if self._ranks_all(logits) and self.relaxation in NETWORKS else _of_label
        return nan_if_invalid(of_label(ranking, logits, labels), logits)

    def per_class(self, logits: Tensor) -> Tensor:
        if self._is_cross_entropy:
            return -logits.log_softmax(1)
        ranking = self.ranking()
        if self.relaxation in NETWORKS:
            table = _network_of_all(ranking, logits) if self._ranks_all(logits) else _networks(ranking, logits)
        else:
            table = _table(ranking, logits)
        return nan_if_invalid(table, logits)

    def _ranks_all(self, logits: Tensor) -> bool:
        return self.candidates is None or self.candidates >= logits.shape[1]

    def extra_repr(self) -> str:
        own = f"relaxation={self.relaxation!r}, tau={self.tau:g}, candidates={self.candidates}"
        return f"{own}, {super().extra_repr().replace(f'k={self.k}', f'k={self._shown}', 1)}"


def _number_of(candidates: int | str | None, k: int, top1: str) -> int | None:
    if isinstance(candidates, str) and candidates == "auto":
        return None if k == 1 and top1 == "softmax" else max(FEWEST, 2 * k + 2)
    if candidates is None:
        return None
    try:
        return integer(candidates, "candidates", at_least=k + 1)
    except ValueError:
        raise ValueError(
            f"candidates must be 'auto', a whole number above k = {k} and below 2**31, or None for all classes, "
            f"got {candidates!r}"
        ) from None


def _mixture(ranking: Ranking, softmax: Tensor, ranks: Tensor) -> Tensor:
    """Return -log sum_r W_r P_r [...] from log P of softmax [...] and of the ranks [R, ...]."""
    terms = torch.cat((softmax[None], ranks)) if ranking.weights[0] else ranks
    weights = [weight for weight in ranking.weights if weight]
    shares = torch.cat([terms.new_full((1,), math.log(weight)) for weight in weights])  # no copy from the CPU
    return -(terms + shares.view(-1, *(1 for _ in softmax.shape))).logsumexp(0)


def _of_label(ranking: Ranking, s: Tensor, label: Tensor) -> Tensor:
    own = s.gather(1, label[:, None])
    m = min(ranking.candidates or s.shape[1], s.shape[1])
    rivals = s.scatter(1, label[:, None], -torch.inf).topk(m - 1, dim=1).values
    candidates = torch.cat((own, rivals), 1)
    if ranking.relaxation in NETWORKS:
        return _of_network(ranking, candidates, torch.zeros_like(label))
    loss = _of_candidates(ranking, candidates)[:, 0]
    return torch.where(own[:, 0] == -torch.inf, torch.inf, loss)


def _of_candidates(ranking: Ranking, s: Tensor) -> Tensor:
    """Return the losses [B, m] of candidates [B, m], each as the label, from one ranking."""
    kept = s > -torch.inf
    ranks = rank_logits(s / ranking.tau, ranking.ranks, ranking.relaxation).log_softmax(-1)
    softmax = torch.where(kept, s, LEAST).log_softmax(-1)
    return _checked(ranking, kept, _mixture(ranking, softmax, ranks.movedim(1, 0)))


def _checked(ranking: Ranking, kept: Tensor, loss: Tensor) -> Tensor:
    """Set the loss to NaN if at most k scores are above -inf, because every set of k then contains all of them."""
    return torch.where(kept.sum(-1, keepdim=True) > ranking.k, loss, torch.nan)


def _table(ranking: Ranking, s: Tensor) -> Tensor:
    """Return the losses [B, n] of every class.

    The highest m classes are ranked together. Any other class is the lowest of its candidates, so the ranking of the m
    - 1 highest classes determines its rank probabilities.
    """
    m = min(ranking.candidates or s.shape[1], s.shape[1])
    top = s.topk(m, dim=1)
    inside = _of_candidates(ranking, top.values)
    if m < s.shape[1]:
        table = _of_lowest(ranking, s, top.values[:, :-1]).scatter(1, top.indices, inside)
    else:
        table = torch.zeros_like(s).scatter(1, top.indices, inside)
    return torch.where(s == -torch.inf, torch.inf, table)


def _of_lowest(ranking: Ranking, s: Tensor, rivals: Tensor) -> Tensor:
    """Return losses [B, n] that are valid for classes below all rivals [B, m - 1]; other entries are meaningless."""
    kept = rivals > -torch.inf
    low = torch.where(kept, rivals, torch.inf).amin(-1, keepdim=True)
    low = torch.where(low < torch.inf, low, 0.0)
    below = torch.where(s > -torch.inf, low - s, 0.0).clamp(min=0.0) / ranking.tau
    offsets, slopes = lowest(ranking, rivals, low)
    violations = offsets[..., None] + slopes[:, None, None] * below
    logs = -F.softplus(violations, threshold=40.0)
    return _mixture(ranking, logs[0], logs[1:])


def lowest(ranking: Ranking, rivals: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    """Return t [R + 1, B] and slope [R + 1]: a class at distance d below all rivals has log-odds -(t + slope d).

    The first entry is for softmax, the others are for the ranks. ``low`` is the lowest of the rivals [B, m - 1].
    """
    kept, m = rivals > -torch.inf, rivals.shape[1] + 1
    x = torch.where(kept, rivals - low, 0.0) / ranking.tau
    softmax = torch.where(kept, ranking.tau * x, LEAST).logsumexp(-1, keepdim=True)
    norms = rank_logits(torch.where(kept, x, -torch.inf), ranking.ranks, ranking.relaxation).logsumexp(-1)
    if ranking.relaxation == "neuralsort":
        offsets, slopes = norms + x.sum(-1, keepdim=True), [2 * (m - r) - 1 for r in range(1, ranking.ranks + 1)]
    else:
        offsets, slopes = norms + x[:, : ranking.ranks], [1] * ranking.ranks
    return torch.cat((softmax, offsets), 1).T, x.new_tensor([ranking.tau, *slopes])


def _of_network(ranking: Ranking, s: Tensor, label: Tensor) -> Tensor:
    """Return the losses [B] of labels among the candidates [B, m], which the network gets in the given order."""
    kept = s > -torch.inf
    own = label[:, None]
    column = torch.zeros_like(s).scatter(1, own, 1.0)[:, :, None]  # one_hot does not support vmap
    ranks = network(s / ranking.tau, column, ranking.relaxation, ranking.swap)[:, : ranking.ranks, 0]
    softmax = torch.where(kept, s, LEAST).log_softmax(-1).gather(1, own)[:, 0]
    loss = _mixture(ranking, softmax, log_probabilities(ranks).T)
    return torch.where(s.gather(1, own)[:, 0] == -torch.inf, torch.inf, loss)


def _network_of_all(ranking: Ranking, s: Tensor) -> Tensor:
    """Return the losses [B, n] of every class from one network that ranks all classes in class order."""
    every = torch.eye(s.shape[1]).to(s).expand(len(s), -1, -1)
    ranks = network(s / ranking.tau, every, ranking.relaxation, ranking.swap)[:, : ranking.ranks]
    return _mixture(ranking, s.log_softmax(-1), log_probabilities(ranks).movedim(1, 0))


def _networks(ranking: Ranking, s: Tensor) -> Tensor:
    """Return the losses [B, n] of every class from one network per class, which gets this class as its first input."""
    blocks = s.split(max(1, ROWS // s.shape[1]))
    if len(blocks) == 1:
        return _networks_of(ranking, s)
    # recomputed in the backward pass, because the networks of all classes would not fit into memory
    return torch.cat([checkpoint(_networks_of, ranking, rows, use_reentrant=False) for rows in blocks])


def _networks_of(ranking: Ranking, s: Tensor) -> Tensor:
    B, n = s.shape
    label = torch.arange(n, device=s.device).repeat(B)
    return _of_label(ranking, s.repeat_interleave(n, 0), label).view(B, n)
