"""The smooth top-k SVM as a row loss: from the logits to the reduced loss in one node of the graph."""

from functools import lru_cache, partial
from math import isfinite

import torch
from torch import Tensor

from topk_registry.ops.hinge import Hinge, soft_hinge
from topk_registry.ops.ksubset.api import smooth_topk_hinge
from topk_registry.ops.ksubset.backends import OPERATOR
from topk_registry.ops.ksubset.margins import topk_margins
from topk_registry.ops.ksubset.numba.backend import hinge_losses
from topk_registry.ops.ksubset.request import SINGLE, SINGLE_TEMPERATURE, check_finite, output_dtype, prepare
from topk_registry.ops.ksubset.torch.expected import expected_hinges
from topk_registry.ops.rows.api import Own, RowLoss, on_cpu
from topk_registry.ops.targets.checks import check_range, check_target
from topk_registry.ops.targets.label_mixture import LabelMixture
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
    kernel, backend = partial(_kernel, k, tau), partial(_backend, k, tau)
    return RowLoss(partial(definition, k, tau, alpha), kernel, own=(own,), backend=backend)


def _backend(k: int, tau: float, scores: Tensor) -> str:
    """The backend of the operator for these scores; torch where more than half of the classes are chosen."""
    if 2 * k > scores.shape[1]:
        return "torch"
    return OPERATOR.choose("auto", scores.device, k, _is_double(k, tau, scores))


def _is_double(k: int, tau: float, scores: Tensor) -> bool:
    """Whether the margins of these scores are computed in double precision, see request.py."""
    return scores.dtype == torch.float64 or k > SINGLE or k * tau > SINGLE_TEMPERATURE


@lru_cache(maxsize=64)
def _kernel(k: int, tau: float) -> "HingeKernel":
    return HingeKernel(k, tau)


def definition(k: int, tau: float, alpha: float | Tensor, scores: Tensor, target: Tensor | None) -> Tensor:
    """The losses by the operators that torch can transform."""
    if target is not None:
        return smooth_topk_hinge(scores, target, k, tau=tau, alpha=alpha)
    margins = topk_margins(scores, k, temperature=k * tau)
    return soft_hinge((alpha.to(margins) if isinstance(alpha, Tensor) else alpha) - margins / k, tau)


class HingeKernel:
    """The kernels of the operator, called as :func:`topk_registry.ops.rows.api.reduced` calls one."""

    def __init__(self, k: int, tau: float) -> None:
        self.k, self.tau = k, tau

    def run(self, own: Own, options: Options, scores: Tensor, wanted: bool) -> tuple[Tensor, Tensor]:
        """The losses or their sum or mean, and the gradient in a precision that holds it; ``own`` is alpha."""
        (alpha,), given = own, scores
        assert alpha is not None
        if scores.dtype == torch.float16:  # its gradient is in single precision anyway
            scores = scores.float()
        if _is_double(self.k, self.tau, scores):  # there the passes over the scores are most of the time
            return self._by_operations(alpha, options, scores)
        target, weight, smoothing, ignore_index, reduction = options
        gaps = on_cpu(alpha, torch.float64)
        assert gaps is not None
        if smoothing and isinstance(target, Tensor) and target.is_floating_point():
            target, smoothing = target.to(torch.float32) * (1 - smoothing) + smoothing / scores.shape[1], 0.0
        copied = scores is not given
        mixed = gaps, target, weight, smoothing, ignore_index, reduction
        value, gradient, wrong = hinge_losses(scores, self.k, self.tau, *mixed, in_place=copied)
        if wrong:
            if isinstance(target, LabelMixture) or not target.is_floating_point():
                check_range(target, scores.shape[1], ignore_index)
            check_finite(given, self.k)
        return value, gradient

    def _by_operations(self, alpha: Tensor, options: Options, scores: Tensor) -> tuple[Tensor, Tensor]:
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
