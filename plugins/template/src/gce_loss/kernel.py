"""The same loss with a kernel of its own, which numba compiles at the first call."""

from collections.abc import Callable
from functools import lru_cache
from math import exp, expm1, inf, log
from typing import Any

import numpy as np
from torch import Tensor

from gce_loss import GeneralisedCrossEntropy
from topk_registry.rows import RowLoss, array_kernel


def rows(q: float, s: np.ndarray, m: np.ndarray, losses: np.ndarray, g: np.ndarray) -> None:
    """Compute losses [B], and gradients [B, n] unless g is empty, of scores s [B, n] and masses m [B, n].

    loss = sum_c m_c (1 - p_c^q) / q,    dloss/ds_j = p_j sum_c m_c p_c^q - m_j p_j^q
    """
    for b in range(s.shape[0]):
        top = -inf
        for c in range(s.shape[1]):
            if not s[b, c] <= top:  # NaN takes this way, too, and stays
                top = s[b, c]
        total = 0.0
        for c in range(s.shape[1]):
            total += exp(s[b, c] - top)
        whole, loss, pull = top + log(total), 0.0, 0.0
        for c in range(s.shape[1]):
            if m[b, c] != 0:
                loss -= m[b, c] * expm1(q * (s[b, c] - whole)) / q
                pull += m[b, c] * exp(q * (s[b, c] - whole))
        losses[b] = loss
        for c in range(g.shape[1]):
            g[b, c] = exp(s[b, c] - whole) * pull
            if m[b, c] != 0:
                g[b, c] -= m[b, c] * exp(q * (s[b, c] - whole))


@lru_cache(maxsize=1)
def compiled() -> Callable[..., None]:
    import numba  # only when the kernel is used: listing losses needs nothing

    return numba.njit(rows, cache=True, nogil=True)


class KernelGeneralisedCrossEntropy(GeneralisedCrossEntropy):
    """Generalised cross-entropy by a kernel of this package, on CPUs.

    See :class:`gce_loss.GeneralisedCrossEntropy` for the formula and the options.
    """

    def __init__(self, *, q: float = 0.7, **options: Any) -> None:
        super().__init__(q=q, **options)

    def row_loss(self, logits: Tensor) -> RowLoss:
        return RowLoss(self._of_target, kernel=array_kernel(self._compute))

    def _compute(self, scores: np.ndarray, masses: np.ndarray, losses: np.ndarray, gradient: np.ndarray | None) -> None:
        compiled()(self.q, scores, masses, losses, scores[:, :0].copy() if gradient is None else gradient)

    def _of_target(self, scores: Tensor, target: Tensor | None) -> Tensor:
        # the same in torch operations, for devices, transforms and derivatives without a kernel
        table = self.per_class(scores)
        if target is None:
            return table
        if target.is_floating_point():
            return (target * table).sum(-1)
        return table.gather(1, target[:, None])[:, 0]
