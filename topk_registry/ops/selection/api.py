"""Hinges that hold the label's score against the best others: a selection of k + 1 scores."""

from functools import lru_cache, partial

import torch
from torch import Tensor

from topk_registry.ops.rows.api import RowKernel, RowLoss
from topk_registry.ops.selection.definition import hinge

MODULE = "topk_registry.ops.selection.numba.kernel"
AGAINST = {"rival": 0, "rank": 1, "mean": 2}


def topk_hinge_loss(k: int, *, against: str = "rival", alpha: float | Tensor = 1.0, factor: float = 1.0) -> RowLoss:
    """The hinge (alpha_y + factor (t - s_y))_+ of a label y on a threshold t, for :func:`topk_registry.row_losses`.

    Args:
        k: size of the set that should hold the label, 1 <= k < n.
        against: ``"rival"``, t is the k-th largest of the other scores; ``"rank"``, the (k+1)-th largest of all;
            ``"mean"``, the mean of the k largest once every other score is raised by 1, with alpha = 0 and factor = 1.
        alpha: required gap, one for all classes or one a class [n].
        factor: of the gap between the scores.
    """
    if against not in AGAINST:
        raise ValueError(f"against must be one of {', '.join(map(repr, AGAINST))}, got {against!r}")
    version = alpha._version if isinstance(alpha, Tensor) else 0
    return RowLoss(
        partial(hinge, against, k, alpha, factor), partial(_kernel, AGAINST[against], k, alpha, version, factor)
    )


@lru_cache(maxsize=64)
def _kernel(kind: int, k: int, alpha: float | Tensor, version: int, factor: float) -> RowKernel:
    def given(dtype: torch.dtype):
        own = alpha.detach().to("cpu", dtype).contiguous() if isinstance(alpha, Tensor) else None
        return [kind, k, 0.0 if isinstance(alpha, Tensor) else alpha, factor], [own]

    return RowKernel(MODULE, given)
