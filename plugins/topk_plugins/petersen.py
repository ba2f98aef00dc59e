r"""Differentiable top-k classification: the likelihood of the label being among the k first of a relaxed ranking.

A relaxed ranking is a matrix P [n, n] whose row r holds the probabilities of each class to have rank r. With the weight
P_K(k) of each k,

    L = -log sum_k P_K(k) sum_{r <= k} P[r, y].

By default softmax takes the place of the first row for k = 1, as in the authors' code, which finds sorting unstable
there. Only the highest scores and the label are ranked.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from topk_plugins._sizes import SeveralSizes, set_sizes
from topk_registry.options import choice, integer, number
from topk_registry.rows import RowLoss, ranking_rows, softmax_rows

RELAXATIONS = ("neuralsort", "softsort", "odd_even", "bitonic")
FEWEST = 16  # candidates, as in the paper


class DifferentiableTopK(SeveralSizes):
    r"""Top-k classification loss over a relaxed ranking, for one k or several.

    .. math:: L(s, y) = -\log \sum_j P_j \sum_{r \le k_j} P_{r y}

    Use when:
        Several k count at once, or you compare ways to relax a ranking.

    Avoid when:
        Classes are many and ``candidates`` is None, or a sorting network is to meet mixed targets (mixup, cutmix, label
        smoothing): both cost many times the ordinary step. ``topk_nll`` takes several k as well and is exact.

    Args:
        k: size of the set that should hold the label, 1 <= k <= n - 1, or several sizes.
        k_weights: how much each of several k counts; they are divided by their sum. None: all the same.
        relaxation: ``"neuralsort"``, ``"softsort"``, ``"odd_even"`` or ``"bitonic"``, the last two being sorting
            networks with soft swaps.
        tau: temperature of the relaxation, positive; towards 0 the ranking becomes hard.
        swap: distribution function that gives the chance of a swap in a network from the difference of two scores:
            ``"cauchy"`` or ``"logistic"``.
        candidates: how many classes are ranked: the label and the highest scores beside it. The others take no part,
            in softmax neither. A number above every k, or None for all, which costs networks O(n^3). ``"auto"`` is
            2 k + 2 of the largest k and at least 16, and all where k = 1 is softmax: nothing is ranked then, and the
            loss is cross-entropy.
        top1: the probabilities for k = 1: ``"softmax"``, or ``"sort"``, the first row of the ranking.
        weight, reduction, label_smoothing, ignore_index: as in ``torch.nn.CrossEntropyLoss``.

    With soft targets every class is a label once. NeuralSort and SoftSort rank the highest classes once for all of
    them, as a class below is the lowest of its candidates. A network has to run for every class.

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
    takes_half = True

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
        weight: Tensor | Sequence[float] | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
    ) -> None:
        self._candidates, self.top1 = candidates, choice(top1, "top1", ("softmax", "sort"))
        super().__init__(
            k,
            k_weights,
            weight=weight,
            reduction=reduction,
            label_smoothing=label_smoothing,
            ignore_index=ignore_index,
        )
        self.relaxation = choice(relaxation, "relaxation", RELAXATIONS)
        self.tau, self.swap = number(tau, "tau", above=0), choice(swap, "swap", ("cauchy", "logistic"))

    def take_sizes(self, k: int | Sequence[int], k_weights: Sequence[float] | None) -> None:
        """Take set sizes and their weights; ``candidates`` depend on the largest."""
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

    def row_loss(self, logits: Tensor) -> RowLoss:
        if self.k == 1 and self.top1 == "softmax" and self.candidates is None:
            return softmax_rows()
        return ranking_rows(
            self.sizes,
            self.shares,
            relaxation=self.relaxation,
            tau=self.tau,
            swap=self.swap,
            candidates=self.candidates,
            softmax=self.top1 == "softmax",
        )

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
