"""Hinges that hold the label's score against the best others: a selection of k + 1 scores."""

from functools import lru_cache, partial

from torch import Tensor

from topk_registry.ops.constant import fixed_number
from topk_registry.ops.rows.api import Kernel, RowLoss, triton_kernel
from topk_registry.ops.rows.numba.backend import row_kernel
from topk_registry.ops.selection.definition import hinge
from topk_registry.ops.values import choice, integer, number

AGAINST = {"rival": 0, "rank": 1, "mean": 2}
LARGEST_K_ON_GPU = 64  # its kernel takes a pass for each; beyond, the selection of torch is better


def topk_hinge_rows(k: int, *, against: str = "rival", alpha: float | Tensor = 1.0, factor: float = 1.0) -> RowLoss:
    """The hinge (alpha_y + factor (t - s_y))_+ of a label y on a threshold t.

    It is a loss for :func:`topk_registry.rows.row_losses`.

    Args:
        k: size of the set that should hold the label, 1 <= k < n.
        against: ``"rival"``, t is the k-th largest of the other scores; ``"rank"``, the (k+1)-th largest of all;
            ``"mean"``, the mean of the k largest once every other score is raised by 1, with alpha = 0 and factor = 1.
        alpha: required gap, one for all classes or one a class [n].
        factor: of the gap between the scores.
    """
    k, factor = integer(k, "k", at_least=1), number(factor, "factor")
    gap, own = (None, alpha) if isinstance(alpha, Tensor) else (fixed_number(number(alpha, "alpha")), None)
    options = AGAINST[choice(against, "against", tuple(AGAINST))], k, gap, factor
    return RowLoss(
        partial(hinge, against, k, alpha if gap is None else gap, factor),
        partial(row_kernel, "selection.numba.kernel:row", options[0], k, gap or 0.0, factor, of_label=True),
        partial(_on_gpu, *options),
        own=(own,),
        more_than=k,
    )


@lru_cache(maxsize=64)
def _on_gpu(kind: int, k: int, alpha: float | None, factor: float) -> Kernel | None:
    if k > LARGEST_K_ON_GPU:
        return None
    return triton_kernel(
        "selection.triton.rows:selection_rows",
        {"alpha": alpha or 0.0, "factor": factor},
        ("own_ptr",),
        {"KIND": kind, "k": k, "EACH": alpha is None},
    )
