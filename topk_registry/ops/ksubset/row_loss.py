"""The smooth top-k SVM as a row loss: from the logits to the reduced loss in one node of the graph."""

from functools import lru_cache, partial
from math import isfinite

import torch
from torch import Tensor

from topk_registry.ops.hinge import Hinge, soft_hinge
from topk_registry.ops.ksubset.api import smooth_topk_hinge
from topk_registry.ops.ksubset.backends import OPERATOR
from topk_registry.ops.ksubset.margins import topk_margins
from topk_registry.ops.ksubset.numba.backend import threads_and_step
from topk_registry.ops.ksubset.numba.narrow_from import LEAST_K, LEAST_K_OF_LABEL
from topk_registry.ops.ksubset.request import SINGLE, SINGLE_TEMPERATURE, check_finite, output_dtype, prepare
from topk_registry.ops.ksubset.torch.expected import expected_hinges
from topk_registry.ops.rows.api import Kernel, RowLoss
from topk_registry.ops.rows.backends import Own
from topk_registry.ops.rows.numba.backend import BatchKernel
from topk_registry.ops.targets.checks import check_target
from topk_registry.ops.targets.masses import Masses, Options, Reduction


def smooth_topk_loss(k: int, *, tau: float = 1.0, alpha: float | Tensor = 1.0) -> RowLoss:
    """The smooth top-k SVM as a loss for :func:`topk_registry.rows.row_losses`; see :func:`smooth_topk_hinge`.

    Args:
        k: size of the set, 1 <= k <= n - 1; up to n / 2 it has a kernel.
        tau: smoothing temperature, positive.
        alpha: required gap, one for all classes or one a class [n]; it gets no gradient.

    Example:
        >>> row_losses(smooth_topk_rows(2, tau=1e-6), torch.tensor([[3.0, 2.0, 1.0, 0.0]]), torch.tensor([1]))
        tensor([0.5000])
    """
    own = alpha if isinstance(alpha, Tensor) else torch.tensor(alpha, dtype=torch.float64)
    return RowLoss(
        partial(definition, k, tau, alpha),
        partial(_kernel, k, tau),
        own=(own,),
        operator=OPERATOR.name,
        request=(k,),
        in_double=_in_double(k, tau),
        least_classes=2 * k,
    )


def _in_double(k: int, tau: float) -> bool:
    """Whether margins are computed in double precision, whatever that of the scores, see request.py."""
    return k > SINGLE or k * tau > SINGLE_TEMPERATURE


@lru_cache(maxsize=64)
def _kernel(k: int, tau: float) -> Kernel:
    """The kernel for the CPU; in double precision the passes over the scores are most of the time."""
    by_operations = OperationsKernel(k, tau)
    if _in_double(k, tau):
        return by_operations
    # below this the loss no longer depends on tau, but its reciprocal would overflow
    least = 4 * torch.finfo(torch.float32).tiny
    return BatchKernel(
        f"ksubset.numba.entries:losses_of_labels{'_if_narrow' if k >= LEAST_K_OF_LABEL else ''}",
        f"ksubset.numba.entries:losses_of_targets{'_if_narrow' if k >= LEAST_K else ''}",
        (k, k * max(tau, least), 1 / k, max(tau, least)),
        shares=partial(threads_and_step, k),
        reads=(torch.float32, torch.bfloat16),  # of float16 scores the gradient is in single precision anyway
        in_double=by_operations.run,
        check=partial(check_finite, k=k),
    )


def definition(k: int, tau: float, alpha: float | Tensor, scores: Tensor, target: Tensor | None) -> Tensor:
    """The losses by the operators that torch can transform."""
    if target is not None:
        return smooth_topk_hinge(scores, target, k, tau=tau, alpha=alpha)
    margins = topk_margins(scores, k, temperature=k * tau)
    return soft_hinge((alpha.to(margins) if isinstance(alpha, Tensor) else alpha) - margins / k, tau)


class OperationsKernel:
    """The operator's own functions, called as a kernel, see :class:`topk_registry.ops.rows.api.Kernel`."""

    def __init__(self, k: int, tau: float) -> None:
        self.k, self.tau = k, tau

    def run(self, own: Own, options: Options, scores: Tensor, wanted: bool) -> tuple[Tensor, Tensor]:
        """The losses or their sum or mean, and the gradient in a precision that holds it; ``own`` is alpha."""
        (alpha,) = own
        assert alpha is not None
        if scores.dtype == torch.float16:  # its gradient is in single precision anyway
            scores = scores.float()
        target, weight, smoothing, ignore_index, reduction = options
        s, size, theta, sign, backend = prepare(scores, self.k, self.k * self.tau, "auto")
        assert sign > 0, "the complement has no kernel for hinges"
        kernels, real = OPERATOR[backend].kernels(), s.dtype
        hinge = Hinge(alpha.detach().to("cpu", real).contiguous(), 1 / self.k, self.tau)
        weight = None if weight is None else weight.detach().to(real).contiguous()
        if isinstance(target, Tensor):
            target = target.detach().to(real if target.is_floating_point() else torch.int64)
        seen = check_target(s, target, ignore_index=ignore_index, look=True)
        masses = Masses.of(target, s.shape[1], weight=weight, smoothing=smoothing, ignore_index=ignore_index, seen=seen)
        q, factor = masses.folded(reduction.name.lower())
        of_rows = kernels.expected_hinges or partial(expected_hinges, kernels)
        value, gradient = of_rows(s, q, size, theta, hinge, weight, factor)
        total = value.sum()
        if not isfinite(total.item()):
            check_finite(s, self.k)
        if reduction is not Reduction.NONE:
            value = total if len(s) or reduction is Reduction.SUM else total * torch.nan
        return value.to(output_dtype(scores)), gradient
