"""One table of all families of row losses, for one contract over them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

import topk_registry as tr
from topk_registry.rows import (
    RowLoss,
    aldr_rows,
    lapsum_rows,
    quadratic_bound_rows,
    ranking_rows,
    smooth_topk_rows,
    soft_topk_rows,
    softmax_rows,
    sparse_topk_rows,
    squares_rows,
    topk_hinge_rows,
)

GAUSSIAN, TIED, FLAT, LEADER, OUTLIER, RULED_OUT = range(6)  # rows of kernels.scores
ALL = (GAUSSIAN, TIED, FLAT, LEADER, OUTLIER, RULED_OUT)


@dataclass(frozen=True)
class Family:
    """A loss of rows, and what of the contract holds for it.

    Args:
        build: makes the loss for n classes.
        temperature: what scores are divided by: their rounding counts by as much.
        rows: kinds of rows that value and gradient are compared on.
        factor: how many roundings a value may be away from the definition's.
        on_gpu: whether it has a kernel for GPUs.
        untied: whether a gradient may choose among equal scores, so that gradients of such rows are not compared.
        spoils_all: whether a NaN spoils the gradient to every class of its row.
    """

    build: Callable[[int], RowLoss]
    temperature: float = 1.0
    rows: tuple[int, ...] = ALL
    factor: int = 8
    on_gpu: bool = True
    untied: bool = False
    spoils_all: bool = True


def built(name: str, n: int, **options) -> RowLoss:
    """A registered loss as a row loss."""
    builder = tr.get_loss_builder(name)
    context = {"num_classes": n, "class_counts": [max(1, 500 // (c + 1)) for c in range(n)]}
    loss = builder(**tr.accepted_context(builder, context), **options).row_loss(torch.zeros(1, n))
    assert loss is not None
    return loss


FINITE = (GAUSSIAN, TIED, FLAT, LEADER, OUTLIER)  # there is no limit at -inf, or too few classes are left
FAMILIES = {
    "cross-entropy": Family(lambda n: softmax_rows()),
    "scaled and shifted": Family(lambda n: softmax_rows(scale=2.0, shift=torch.linspace(-1, 1, n)), 0.5),
    "focal": Family(lambda n: built("focal", n)),
    "a margin a class": Family(lambda n: built("ldam", n, scale=3.0), 1 / 3),
    "of a power": Family(lambda n: built("generalised_cross_entropy", n)),
    "with others": Family(lambda n: built("mirror", n, link="softmax", gamma=0.7)),
    "the best class": Family(lambda n: built("epsilon_softmax", n, m=1.0, alpha=1.0)),
    "the best classes": Family(lambda n: built("epsilon_softmax", n, k=5, m=0.2, alpha=1.0, beta=0.5, floor=1e-8)),
    "sigmoid": Family(lambda n: built("sigmoid_mse", n), spoils_all=False),  # its classes are apart
    "sigmoid with logarithms": Family(lambda n: built("mirror", n, base="mae", gamma=1.5), spoils_all=False),
    "squares": Family(lambda n: squares_rows(epsilon=0.5, shift=0.3), rows=FINITE),
    "bound": Family(lambda n: quadratic_bound_rows(), rows=FINITE),
    "rival": Family(lambda n: topk_hinge_rows(4), untied=True),
    "rival with gaps": Family(
        lambda n: topk_hinge_rows(3, alpha=torch.linspace(0, 2, n), factor=1 / 3), untied=True
    ),
    "rank": Family(lambda n: topk_hinge_rows(5, against="rank"), untied=True),
    "mean": Family(lambda n: topk_hinge_rows(4, against="mean"), untied=True),
    "mean of one": Family(lambda n: topk_hinge_rows(1, against="mean"), untied=True),
    "lapsum flat": Family(lambda n: lapsum_rows(5, tau=1.0), on_gpu=False),
    "lapsum cold": Family(lambda n: lapsum_rows(3.7, tau=0.1), 0.1, on_gpu=False),
    "lapsum below one": Family(lambda n: lapsum_rows(0.3, tau=0.2), 0.2, on_gpu=False),
    "lapsum nearly all": Family(lambda n: lapsum_rows(n - 0.5, tau=1.0), rows=FINITE, on_gpu=False),
    "soft top-k": Family(lambda n: soft_topk_rows(5)),
    "soft top-k cold": Family(lambda n: soft_topk_rows(3.7, tau=0.1), 0.1),
    "soft top-k at a gap": Family(lambda n: soft_topk_rows(3, tau=0.003), 0.003),
    "soft top-k below one": Family(lambda n: soft_topk_rows(0.3, tau=0.2), 0.2),
    "soft top-k nearly all": Family(lambda n: soft_topk_rows(n - 0.5, tau=1.0), rows=FINITE),
    "aldr": Family(lambda n: aldr_rows(), 0.5, on_gpu=False),
    "aldr cold": Family(lambda n: aldr_rows(temperature=0.5, alpha=3.0, gap=0.0), 0.3, on_gpu=False),
    "sparse one": Family(lambda n: sparse_topk_rows(1, tau=0.5), 0.5, on_gpu=False),
    "sparse": Family(lambda n: sparse_topk_rows(5, tau=0.3), 0.3, on_gpu=False),
    "sparse warm": Family(lambda n: sparse_topk_rows(5, tau=20.0), 20.0, on_gpu=False),
    "neuralsort": Family(
        lambda n: ranking_rows((1, 3, 5), (0.2, 0.3, 0.5), candidates=9), untied=True, factor=16, on_gpu=False
    ),
    "softsort": Family(
        lambda n: ranking_rows((1, 3, 5), (0.2, 0.3, 0.5), candidates=9, relaxation="softsort", tau=0.5),
        0.5, untied=True, factor=16, on_gpu=False,
    ),
    "smooth top-k": Family(lambda n: smooth_topk_rows(3, tau=0.3), 0.9, factor=16),
    "smooth top-k of twelve": Family(lambda n: smooth_topk_rows(12, tau=0.3), 3.6, factor=16),
    "smooth top-k with gaps": Family(
        lambda n: smooth_topk_rows(5, tau=1.0, alpha=torch.linspace(0, 2, n).double()), factor=16
    ),
}  # fmt: skip
# left out: the perturbed hinge, whose kernel and definition must see the same noise (perturbed/test_row_loss.py)
