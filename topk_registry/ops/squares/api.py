"""Losses that depend on the label's score, the sum and the sum of squares of all scores."""

import math
from functools import lru_cache, partial

from topk_registry.ops.rows.api import Kernel, RowLoss, triton_kernel
from topk_registry.ops.rows.numba.backend import row_kernel
from topk_registry.ops.squares import definition
from topk_registry.ops.values import number


def squares_rows(*, epsilon: float = 1.0, shift: float = 0.0) -> RowLoss:
    """The negative log-likelihood log sum_j w_j - log w_y of a label y, w = (scores + shift)^2 + epsilon, for
    :func:`topk_registry.rows.row_losses`.

    Args:
        epsilon: above 0.
        shift: added to all scores.
    """
    epsilon, shift = number(epsilon, "epsilon", above=0), number(shift, "shift")
    loss = partial(definition.log_likelihood, epsilon, shift)
    numbers = 0.0, shift, epsilon
    return RowLoss(loss, partial(row_kernel, "squares.numba.kernel:row", *numbers), partial(_on_gpu, *numbers))


def quadratic_bound_rows() -> RowLoss:
    """Bouchard's upper bound on cross-entropy, quadratic in the scores and at its tightest, for
    :func:`topk_registry.rows.row_losses`."""
    numbers = 1.0, 0.0, 0.0
    return RowLoss(
        definition.quadratic_bound,
        partial(row_kernel, "squares.numba.kernel:row", *numbers),
        partial(_on_gpu, *numbers),
    )


@lru_cache(maxsize=32)
def _on_gpu(bound: float, shift: float, epsilon: float) -> Kernel:
    numbers = {"added": shift, "root": math.sqrt(epsilon)}
    return triton_kernel("squares.triton.rows:squares_rows", numbers, (), {"BOUND": bound != 0})
