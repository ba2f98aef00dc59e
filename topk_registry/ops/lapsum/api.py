"""The loss over LapSum's soft top-k."""

from functools import partial

from topk_registry.ops.lapsum.definition import lapsum
from topk_registry.ops.rows.api import RowLoss
from topk_registry.ops.rows.numba.backend import row_kernel
from topk_registry.ops.values import number


def lapsum_rows(k: float, *, tau: float = 1.0) -> RowLoss:
    """The loss -log p_y of a label y, p its weight in LapSum's soft top-k, for :func:`topk_registry.rows.row_losses`.

    Args:
        k: how many classes are chosen, 0 < k < n; it may be any real number.
        tau: temperature, positive.
    """
    k, tau = number(k, "k", above=0), number(tau, "tau", above=0)
    return RowLoss(
        partial(lapsum, k, tau),
        partial(row_kernel, "lapsum.numba.kernel:row", k, tau, of_label=True),
        more_than=k,
    )
