"""The loss over sigmoids with one threshold a row."""

from functools import lru_cache, partial

from topk_registry.ops.rows.api import Kernel, RowLoss, triton_kernel
from topk_registry.ops.rows.numba.backend import row_kernel
from topk_registry.ops.threshold.definition import soft_topk
from topk_registry.ops.values import number


def soft_topk_rows(k: float, *, tau: float = 1.0) -> RowLoss:
    """The loss -log p_y of a label y, p = sigmoid(s / tau - b) with b such that p adds up to k, for
    :func:`topk_registry.rows.row_losses`.

    Args:
        k: how many classes are chosen, 0 < k < n; it may be any real number.
        tau: temperature, positive.
    """
    k, tau = number(k, "k", above=0), number(tau, "tau", above=0)
    return RowLoss(
        partial(soft_topk, k, tau),
        partial(row_kernel, "threshold.numba.kernel:row", k, tau, of_label=True),
        partial(_on_gpu, k, tau),
        more_than=k,
    )


@lru_cache(maxsize=128)
def _on_gpu(k: float, tau: float) -> Kernel | None:
    return triton_kernel("threshold.triton.rows:threshold_rows", {"k": k, "tau": tau}, (), {})
