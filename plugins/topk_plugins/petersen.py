r"""Differentiable top-k classification: the likelihood of the label being among the k first of a relaxed ranking.

A relaxed ranking is a matrix P [n, n] whose row r holds the probabilities of each class to have rank r. With the weight
P_K(k) of each k,

    L = -log sum_k P_K(k) sum_{r <= k} P[r, y].

By default softmax takes the place of the first row for k = 1, as in the authors' code, which finds sorting unstable
there. Only the highest scores and the label are ranked.
"""

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from topk_plugins._relaxations import RELAXATIONS, log_ranks
from topk_plugins._sizes import mixture_nll, set_sizes
from topk_registry import TopKLoss

ROWS = 1 << 14  # rows of candidates at a time, when every class of every row is taken as its label


class DifferentiableTopK(TopKLoss):
    r"""Top-k classification loss over a relaxed ranking, for one k or several.

    .. math:: L(s, y) = -\log \sum_j P_j \sum_{r \le k_j} P_{r y}

    Use when:
        Several k count at once, or you compare ways to relax a ranking.

    Avoid when:
        Classes are many and ``candidates`` is None, or targets are mixed (mixup, cutmix): both cost many times the
        ordinary step. ``topk_nll`` takes several k as well and is exact.

    Args:
        k: size of the set that should hold the label, 1 <= k <= n - 1, or several sizes.
        k_weights: how much each of several k counts; they are divided by their sum. None: all the same.
        relaxation: ``"neuralsort"``, ``"softsort"``, ``"odd_even"`` or ``"bitonic"``, the last two being sorting
            networks with soft swaps.
        tau: temperature of the relaxation, positive; towards 0 the ranking becomes hard.
        swap: distribution function that gives the chance of a swap in a network from the difference of two scores:
            ``"cauchy"`` or ``"logistic"``.
        candidates: how many classes are ranked: the label and the highest scores beside it. The others take
            no part. None: all, which costs networks O(n^3).
        top1: the probabilities for k = 1: ``"softmax"``, or ``"sort"``, the first row of the ranking.
        weight, reduction, label_smoothing, ignore_index: as in ``torch.nn.CrossEntropyLoss``.

    With soft targets every class is ranked as a label once, at n times the cost.

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

    def __init__(
        self,
        k: int | Sequence[int] = 5,
        *,
        k_weights: Sequence[float] | None = None,
        relaxation: str = "neuralsort",
        tau: float = 1.0,
        swap: str = "cauchy",
        candidates: int | None = 16,
        top1: str = "softmax",
        weight: Tensor | Sequence[float] | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
    ) -> None:
        self.sizes, self.shares, self._shown = set_sizes(k, k_weights)
        super().__init__(
            max(self.sizes),
            weight=weight,
            reduction=reduction,
            label_smoothing=label_smoothing,
            ignore_index=ignore_index,
        )
        if relaxation not in RELAXATIONS:
            raise ValueError(f"relaxation must be one of {', '.join(map(repr, RELAXATIONS))}, got {relaxation!r}")
        if swap not in ("cauchy", "logistic"):
            raise ValueError(f"swap must be 'cauchy' or 'logistic', got {swap!r}")
        if top1 not in ("softmax", "sort"):
            raise ValueError(f"top1 must be 'softmax' or 'sort', got {top1!r}")
        if not 0.0 < tau < math.inf:
            raise ValueError(f"tau must be positive and finite, got {tau!r}")
        if candidates is not None and candidates <= self.k:
            raise ValueError(f"candidates must be above k = {self.k}, or None for all classes, got {candidates!r}")
        self.relaxation, self.tau, self.swap, self.top1 = relaxation, float(tau), swap, top1
        self.candidates = candidates

    def per_label(self, logits: Tensor, label: Tensor) -> Tensor:
        if self._takes_all(logits):
            return self._of_ranks(logits, self._ranks(logits)).gather(1, label[:, None])[:, 0]
        return self._at_classes(logits, label[:, None])[:, 0]

    def per_class(self, logits: Tensor) -> Tensor:
        if self._takes_all(logits):
            return self._of_ranks(logits, self._ranks(logits))
        blocks = logits.split(max(1, ROWS // logits.shape[1]))
        every = torch.arange(logits.shape[1], device=logits.device)
        if len(blocks) == 1:
            return self._at_classes(logits, every.expand(logits.shape))
        # computed again in the backward pass, as the ranks of every class as a label would not fit into memory
        losses = [checkpoint(self._at_classes, x, every.expand(x.shape), use_reentrant=False) for x in blocks]
        return torch.cat(losses)

    def _at_classes(self, logits: Tensor, classes: Tensor) -> Tensor:
        """Return the losses [B, c] of classes [B, c], each ranked among its rivals."""
        candidates = _with_rivals(logits, classes, self._size).flatten(0, 1)
        return self._of_ranks(candidates, self._ranks(candidates))[:, 0].view(classes.shape)

    @property
    def _size(self) -> int:
        assert self.candidates is not None
        return self.candidates

    def _takes_all(self, logits: Tensor) -> bool:
        return self.candidates is None or self.candidates >= logits.shape[1]

    def _ranks(self, scores: Tensor) -> Tensor:
        return log_ranks(scores / self.tau, self.k, self.relaxation, self.swap)

    def _of_ranks(self, scores: Tensor, ranks: Tensor) -> Tensor:
        """Return the losses [B, n] of scores [B, n] from the logarithms of their ranks' probabilities [B, k, n]."""
        losses = []
        for k in self.sizes:
            softmax = k == 1 and self.top1 == "softmax"
            losses.append(-(scores.log_softmax(-1) if softmax else ranks[:, :k].logsumexp(1)))
        return mixture_nll(torch.stack(losses), self.shares)

    def extra_repr(self) -> str:
        own = f"relaxation={self.relaxation!r}, tau={self.tau:g}, candidates={self.candidates}"
        return f"{own}, {super().extra_repr().replace(f'k={self.k}', f'k={self._shown}', 1)}"


def _with_rivals(logits: Tensor, classes: Tensor, m: int) -> Tensor:
    """Return the score of each class [B, c], then the m - 1 highest others in descending order: [B, c, m]."""
    top = logits.topk(m, dim=1)
    ranks = torch.arange(m, device=logits.device)
    place = torch.full_like(logits, m, dtype=torch.int64).scatter(1, top.indices, ranks.expand(len(logits), m))
    rival = ranks[:-1] + (ranks[:-1] >= place.gather(1, classes)[:, :, None])
    rivals = top.values[:, None].expand(-1, classes.shape[1], -1).gather(2, rival)
    return torch.cat((logits.gather(1, classes)[:, :, None], rivals), 2)
