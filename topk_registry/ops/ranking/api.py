"""The likelihood of the label being among the first of a relaxed ranking."""

from collections.abc import Sequence
from functools import partial

from topk_registry.ops.ranking.definition import Ranking, ranked
from topk_registry.ops.rows.api import RowLoss
from topk_registry.ops.rows.numba.backend import row_kernel
from topk_registry.ops.values import integer, number

COMPILED = {"neuralsort": 0, "softsort": 1}  # relaxations that the row kernel knows, by its numbers for them


def ranking_rows(
    sizes: Sequence[int],
    shares: Sequence[float],
    *,
    relaxation: str = "neuralsort",
    tau: float = 1.0,
    swap: str = "cauchy",
    candidates: int | None = 16,
    softmax: bool = True,
) -> RowLoss:
    """The loss -log sum_j P_j sum_{r <= k_j} P[r, y] over relaxed ranks, for :func:`topk_registry.rows.row_losses`.

    Args:
        sizes: the k_j, each at least 1.
        shares: the P_j, positive; they add up to 1.
        relaxation: ``"neuralsort"``, ``"softsort"``, ``"odd_even"`` or ``"bitonic"``.
        tau: temperature, positive.
        swap: of a network: ``"cauchy"`` or ``"logistic"``.
        candidates: how many classes are ranked, above every k_j: the label and the highest scores beside it; None for
            all.
        softmax: whether softmax over the candidates takes the place of the first rank for k_j = 1.
    """
    sizes = [integer(size, "sizes", at_least=1) for size in sizes]
    candidates = None if candidates is None else integer(candidates, "candidates", at_least=max(sizes) + 1)
    tau = number(tau, "tau", above=0)
    ranking = Ranking.of_sizes(sizes, shares, relaxation, tau, swap, candidates, softmax)
    # a relaxed sort of all scores is not quick in any language, and a network runs through many layers
    if relaxation not in COMPILED or candidates is None:
        return RowLoss(partial(ranked, ranking), more_than=ranking.k)
    numbers = (
        COMPILED[relaxation],
        candidates,
        ranking.k,
        ranking.tau,
        len(ranking.weights),
        *ranking.weights,
    )
    kernel = partial(row_kernel, "ranking.numba.kernel:row", *numbers, of_label=True)
    return RowLoss(partial(ranked, ranking), kernel, more_than=ranking.k)
