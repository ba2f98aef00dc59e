r"""LapSum: a soft top-k whose weights are distribution functions of the Laplace law.

    p_i = F((s_i - b) / tau),  F(u) = e^u / 2 for u <= 0, else 1 - e^{-u} / 2,  with b such that sum_i p_i = k.

Between two neighbouring scores the sum is m - B e^b + A e^{-b}, with m scores above b, A = sum e^{x_i} / 2 over those
below and B = sum e^{-x_i} / 2 over those above (x = s / tau). So b follows from sorted scores and one quadratic, in
O(n log n). k may be any real number between 0 and n. The Jacobian is diag(d) - d q^T, d_i = e^{-|x_i - b|} / (2 tau)
and q = d / sum d.
"""

from torch import Tensor

from topk_plugins._real_k import RealK
from topk_registry.rows import RowLoss, lapsum_rows


class LapSum(RealK):
    r"""Negative log of the label's weight in LapSum's soft top-k.

    .. math:: L(s, y) = -\log p_y, \qquad p_i = F\Bigl(\frac{s_i - b}{\tau}\Bigr), \qquad \sum_i p_i = k

    F is the distribution function of the Laplace law.

    Use when:
        K is no whole number, or you compare soft top-k operators.

    Avoid when:
        Speed counts: it sorts every row in double precision. ``topk_nll`` asks nearly the same, with compiled kernels.

    Args:
        k: how many classes are chosen, 0 < k < n; it may be any real number.
        tau: temperature, positive; towards 0 the weights become the hard top-k.
        weight, reduction, label_smoothing, ignore_index: as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> LapSum(k=2)(torch.zeros(1, 4), torch.tensor([0]))
        tensor(0.6931)

    Reference: Struski, Bednarczyk, Podolak, Tabor. LapSum: One Method to Differentiate Them All: Ranking, Sorting and
    Top-k Selection. ICML 2025.
    """

    def row_loss(self, logits: Tensor) -> RowLoss:
        return lapsum_rows(self.k, tau=self.tau)
