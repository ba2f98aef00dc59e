r"""Differentiable top-k classification: the likelihood of the label being among the k first of a relaxed ranking.

A relaxed ranking is a matrix P [n, n] whose row r holds the chances of each class to have rank r. With P_K, how much
each k counts,

    L = -log sum_k P_K(k) sum_{r <= k} P[r, y].

By default softmax takes the place of the first row for k = 1, as in the authors' code, which finds sorting unstable
there. Only the highest scores and the label are ranked.
"""

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from topk_plugins._relaxations import RELAXATIONS, log_ranks
from topk_plugins._sizes import mixture_nll, set_sizes
from topk_registry import TopKLoss

ROWS = 1 << 14  # of candidates at once, where every class of every row is asked for


class DifferentiableTopK(TopKLoss):
    r"""Top-k classification loss over a relaxed ranking, for one k or several.

    .. math:: L(s, y) = -\log \sum_j P_j \sum_{r \le k_j} P_{r y}

    Args:
        k: size of the set that should hold the label, 1 <= k <= n - 1, or several sizes.
        k_weights: how much each of several k counts; they are divided by their sum. None: all the same.
        relaxation: ``"neuralsort"``, ``"softsort"``, ``"odd_even"`` or ``"bitonic"``, the last two being sorting
            networks with soft swaps.
        tau: temperature of the relaxation, positive; towards 0 the ranking becomes hard.
        swap: chance of a swap in a network as a function of the difference: ``"cauchy"`` or ``"logistic"``.
        candidates: how many classes are ranked: the label and the highest scores beside it. The others take
            no part. None: all, which costs networks O(n^3).
        top1: what stands for k = 1: ``"softmax"``, or ``"sort"`` for the first row of the ranking.
        weight, reduction, label_smoothing, ignore_index: as in ``torch.nn.CrossEntropyLoss``.

    With soft targets every class is ranked as a label once, at n times the cost.

    Example:
        >>> DifferentiableTopK(k=[1, 3])(torch.zeros(1, 4), torch.tensor([0]))
        tensor(0.7376)

    Reference: Petersen, Kuehne, Borgelt, Deussen. Differentiable Top-k Classification Learning. ICML 2022. Relaxations:
    Grover, Wang, Zweig, Ermon 2019 (NeuralSort); Prillo, Eisenschlos 2020 (SoftSort); Petersen, Borgelt, Kuehne,
    Deussen 2022, Monotonic Differentiable Sorting Networks.
    """

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
        return self._with_label_first(_with_rivals(logits, label, self._size))

    def per_class(self, logits: Tensor) -> Tensor:
        if self._takes_all(logits):
            return self._of_ranks(logits, self._ranks(logits))
        n = logits.shape[1]
        every = torch.arange(n, device=logits.device)
        losses = [
            self._with_label_first(
                _with_rivals(rows[:, None].expand(-1, n, n).flatten(0, 1), every.repeat(len(rows)), self._size)
            )
            for rows in logits.split(max(1, ROWS // n))
        ]
        return torch.cat(losses).view(logits.shape)

    @property
    def _size(self) -> int:
        assert self.candidates is not None
        return self.candidates

    def _takes_all(self, logits: Tensor) -> bool:
        return self.candidates is None or self.candidates >= logits.shape[1]

    def _ranks(self, scores: Tensor) -> Tensor:
        return log_ranks(scores / self.tau, self.k, self.relaxation, self.swap)

    def _with_label_first(self, scores: Tensor) -> Tensor:
        """The loss [R] of candidates [R, m] whose first one is the label."""
        return self._of_ranks(scores, self._ranks(scores))[:, 0]

    def _of_ranks(self, scores: Tensor, ranks: Tensor) -> Tensor:
        """The losses [B, n] of the scores [B, n] and the logarithms of their chances of ranks [B, k, n]."""
        losses = []
        for k in self.sizes:
            softmax = k == 1 and self.top1 == "softmax"
            losses.append(-(scores.log_softmax(-1) if softmax else ranks[:, :k].logsumexp(1)))
        return mixture_nll(torch.stack(losses), self.shares)

    def extra_repr(self) -> str:
        own = f"relaxation={self.relaxation!r}, tau={self.tau:g}, candidates={self.candidates}"
        return f"{own}, {super().extra_repr().replace(f'k={self.k}', f'k={self._shown}', 1)}"


def _with_rivals(logits: Tensor, label: Tensor, m: int) -> Tensor:
    """The label's score, then the m - 1 highest others in descending order [B, m]."""
    where = label[:, None]
    others = logits.scatter(1, where, -torch.inf).topk(m - 1, dim=1).values
    return torch.cat((logits.gather(1, where), others), 1)
