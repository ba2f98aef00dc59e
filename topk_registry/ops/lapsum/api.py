"""The loss over LapSum's soft top-k."""

from functools import lru_cache, partial

from topk_registry.ops.lapsum.definition import lapsum
from topk_registry.ops.rows.api import RowKernel, RowLoss


def lapsum_loss(k: float, *, tau: float = 1.0) -> RowLoss:
    """The loss -log p_y of a label y, p its weight in LapSum's soft top-k, for :func:`topk_registry.rows.row_losses`.

    Args:
        k: how many classes are chosen, 0 < k < n; it may be any real number.
        tau: temperature, positive.
    """
    return RowLoss(partial(lapsum, k, tau), partial(_kernel, float(k), float(tau)))


@lru_cache(maxsize=64)
def _kernel(k: float, tau: float) -> RowKernel:
    return RowKernel("lapsum.numba.kernel:row", (k, tau))
