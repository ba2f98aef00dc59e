"""The smooth top-k SVM as a row loss: from the logits to the reduced loss in one node of the graph."""

from functools import lru_cache, partial

import torch
from torch import Tensor

from topk_registry.ops.backend import load
from topk_registry.ops.hinge import invertible, soft_hinge
from topk_registry.ops.ksubset.backends import OPERATOR
from topk_registry.ops.ksubset.margins import topk_margins
from topk_registry.ops.ksubset.numba.backend import loss_kernel
from topk_registry.ops.ksubset.request import SINGLE, SINGLE_TEMPERATURE
from topk_registry.ops.ksubset.targets_api import smooth_topk_hinge
from topk_registry.ops.rows.api import Kernel, RowLoss
from topk_registry.ops.values import integer, number


def smooth_topk_rows(k: int, *, tau: float = 1.0, alpha: float | Tensor = 1.0) -> RowLoss:
    """The smooth top-k SVM as a loss for :func:`topk_registry.rows.row_losses`; see :func:`smooth_topk_hinge`.

    Args:
        k: size of the set, 1 <= k <= n - 1; up to n / 2 it has a kernel.
        tau: smoothing temperature, positive.
        alpha: required gap, one for all classes or one a class [n]; it gets no gradient.

    Example:
        >>> row_losses(smooth_topk_rows(2, tau=1e-6), torch.tensor([[3.0, 2.0, 1.0, 0.0]]), torch.tensor([1]))
        tensor([0.5000])
    """
    k, tau = integer(k, "k", at_least=1), number(tau, "tau", above=0)
    own = alpha if isinstance(alpha, Tensor) else torch.tensor(number(alpha, "alpha"), dtype=torch.float64)
    return RowLoss(
        partial(definition, k, tau, alpha),
        partial(_kernel, k, tau),
        partial(_kernel_on_gpu, k, tau),
        own=(own,),
        operator=OPERATOR.name,
        request=(k,),
        in_double=_in_double(k, tau),
        least_classes=2 * k,
        more_than=k,
    )


def _in_double(k: int, tau: float) -> bool:
    """Whether margins are computed in double precision, whatever that of the scores, see request.py."""
    return k > SINGLE or k * tau > SINGLE_TEMPERATURE


@lru_cache(maxsize=64)
def _kernel(k: int, tau: float) -> Kernel:
    """The kernel for the CPU."""
    in_double = _in_double(k, tau)
    tau = invertible(tau, torch.float64 if in_double else torch.float32)
    return loss_kernel(k, k * tau, 1 / k, tau, in_double)


def _kernel_on_gpu(k: int, tau: float) -> Kernel:
    return load("topk_registry.ops.ksubset.triton.backend").loss_kernel(k, tau)


def definition(k: int, tau: float, alpha: float | Tensor, scores: Tensor, target: Tensor | None) -> Tensor:
    """The losses by the operators that torch can transform."""
    if target is not None:
        return smooth_topk_hinge(scores, target, k, tau=tau, alpha=alpha)
    margins = topk_margins(scores, k, temperature=k * tau)
    return soft_hinge((alpha.to(margins) if isinstance(alpha, Tensor) else alpha) - margins / k, tau)
