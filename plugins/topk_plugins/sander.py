r"""Sparse top-k: the hard top-k mask, smoothed by a quadratic term so that it stays sparse.

    mask(x, k) = argmax_mu  x mu - |mu|^2 / 2  over 0 <= mu <= 1, sum mu = k  =  clip(x - theta, 0, 1),  x = s / tau

is Sander et al.'s top-k mask for p = 2. The loss compares the value of this maximum with that of the best mu that holds
the label entirely, as the smooth top-k SVM does with sums over sets. It is the sparsemax loss for k = 1.
"""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from topk_registry import TopKLoss
from topk_registry.options import number
from topk_registry.rows import RowLoss, sparse_topk_rows


class SparseTopK(TopKLoss):
    r"""How much the best sparse mask gains over the best one that holds the label.

    .. math:: L(s, y) = \tau \Bigl(\max_{\mu} \Omega(\mu) - \max_{\mu: \mu_y = 1} \Omega(\mu)\Bigr), \qquad
        \Omega(\mu) = \frac{s^\top \mu}{\tau} - \frac12 \|\mu\|^2

    over :math:`0 \le \mu \le 1, \sum_i \mu_i = k`. The mask is the paper's for p = 2; the loss is this
    package's own construction on it. It is 0 where the label is in the mask entirely: when its score is tau above the
    (k+1)-th, as with a hinge. Gradients are differences of two masks, and sparse.

    Use when:
        Gradients should be exactly zero for classes that do not compete for the k places.

    Avoid when:
        Speed counts: each row solves two small problems in double precision, and soft targets many. ``topk_nll`` is
        the dense counterpart.

    Args:
        k: size of the set that should hold the label, 1 <= k <= n - 1.
        tau: how strong the quadratic term is, positive; towards 0 the mask becomes hard.
        weight, reduction, label_smoothing, ignore_index: as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> SparseTopK(k=1)(torch.tensor([[0.5, 0.0]]), torch.tensor([0]))
        tensor(0.0625)

    Reference: Sander, Puigcerver, Djolonga, Peyre, Blondel. Fast, Differentiable and Sparse Top-k: a Convex Analysis
    Perspective. ICML 2023. For k = 1: Martins, Astudillo. From Softmax to Sparsemax. ICML 2016.
    """

    option_ranges: ClassVar = {"tau": "(0, inf)"}
    tuning_grid: ClassVar = {"tau": (0.3, 1.0, 3.0)}
    takes_half = True

    def __init__(
        self,
        k: int = 5,
        *,
        tau: float = 1.0,
        weight: Tensor | Sequence[float] | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
    ) -> None:
        super().__init__(
            k, weight=weight, reduction=reduction, label_smoothing=label_smoothing, ignore_index=ignore_index
        )
        self.tau = number(tau, "tau", above=0)

    def row_loss(self, logits: Tensor) -> RowLoss:
        return sparse_topk_rows(self.k, tau=self.tau)

    def extra_repr(self) -> str:
        return f"tau={self.tau:g}, {super().extra_repr()}"
