"""The loss over sparse top-k masks."""

from functools import partial

from topk_registry.ops.rows.api import RowLoss
from topk_registry.ops.rows.numba.backend import row_kernel
from topk_registry.ops.sparse.definition import sparse_topk
from topk_registry.ops.values import integer, number


def sparse_topk_rows(k: int, *, tau: float = 1.0) -> RowLoss:
    """How much the best sparse mask of k gains over the best one that holds the label, for
    :func:`topk_registry.rows.row_losses`.

    Args:
        k: size of the set that should hold the label, 1 <= k < n.
        tau: how strong the quadratic term is, positive.
    """
    k, tau = integer(k, "k", at_least=1), number(tau, "tau", above=0)
    return RowLoss(
        partial(sparse_topk, k, tau),
        partial(row_kernel, "sparse.numba.kernel:row", k, tau, of_label=True),
        more_than=k,
    )
