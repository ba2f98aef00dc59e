"""Hinges that hold the label's score against the best others: a selection of k + 1 scores."""

from functools import lru_cache, partial

import torch
from torch import Tensor

from topk_registry.ops.backend import load
from topk_registry.ops.rows.api import Kernel, RowKernel, RowLoss
from topk_registry.ops.selection.definition import hinge

MODULE = "topk_registry.ops.selection.numba.kernel"
AGAINST = {"rival": 0, "rank": 1, "mean": 2}
LARGEST_K_ON_GPU = 64  # its kernel takes a pass for each; beyond, the selection of torch is better


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
    options = AGAINST[against], k, alpha, version, factor
    return RowLoss(partial(hinge, against, k, alpha, factor), partial(_kernel, *options), partial(_on_gpu, *options))


@lru_cache(maxsize=64)
def _kernel(kind: int, k: int, alpha: float | Tensor, version: int, factor: float) -> RowKernel:
    def given(dtype: torch.dtype):
        own = alpha.detach().to("cpu", dtype).contiguous() if isinstance(alpha, Tensor) else None
        return [kind, k, 0.0 if isinstance(alpha, Tensor) else alpha, factor], [own]

    return RowKernel(MODULE, given)


@lru_cache(maxsize=64)
def _on_gpu(kind: int, k: int, alpha: float | Tensor, version: int, factor: float) -> Kernel | None:
    if k > LARGEST_K_ON_GPU:
        return None
    rows = load("topk_registry.ops.selection.triton.rows")
    each = isinstance(alpha, Tensor)
    return load("topk_registry.ops.rows.triton.driver").TritonRows(
        rows.selection_rows,
        {"alpha": 0.0 if each else float(alpha), "factor": float(factor)},
        {"own_ptr": alpha if each else None},
        {"KIND": kind, "k": k, "EACH": each},
    )
