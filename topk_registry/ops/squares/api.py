"""Losses that depend on the label's score, the sum and the sum of squares of all scores."""

from functools import lru_cache, partial

from topk_registry.ops.rows.api import RowKernel, RowLoss
from topk_registry.ops.squares import definition


def squares_loss(*, epsilon: float = 1.0, shift: float = 0.0) -> RowLoss:
    """The negative log-likelihood log sum_j w_j - log w_y of a label y, w = (scores + shift)^2 + epsilon, for
    :func:`topk_registry.row_losses`.

    Args:
        epsilon: above 0.
        shift: added to all scores.
    """
    loss = partial(definition.log_likelihood, float(epsilon), float(shift))
    return RowLoss(loss, partial(_kernel, 0.0, float(shift), float(epsilon)))


def quadratic_bound_loss() -> RowLoss:
    """Bouchard's upper bound on cross-entropy, quadratic in the scores and at its tightest, for
    :func:`topk_registry.row_losses`."""
    return RowLoss(definition.quadratic_bound, partial(_kernel, 1.0, 0.0, 0.0))


@lru_cache(maxsize=32)
def _kernel(bound: float, shift: float, epsilon: float) -> RowKernel:
    return RowKernel("topk_registry.ops.squares.numba.kernel", lambda dtype: ([bound, shift, epsilon], [0]))
