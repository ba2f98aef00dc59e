r"""SoftTop-k: a soft top-k of sigmoids with one threshold a row.

    p_i = sigmoid(s_i / tau - b),  with b such that sum_i p_i = k.

b is found by a few passes over the row, whatever k is, and nothing is sorted. k may be any real number between 0 and n.
The Jacobian is (diag(v) - v v^T / sum v) / tau, v_i = p_i (1 - p_i).
"""

from torch import Tensor

from topk_plugins._real_k import RealK
from topk_registry.rows import RowLoss, soft_topk_rows


class SoftTopK(RealK):
    r"""Negative log of the label's weight in a soft top-k of sigmoids.

    .. math:: L(s, y) = -\log p_y, \qquad p_i = \sigma\Bigl(\frac{s_i}{\tau} - b\Bigr), \qquad \sum_i p_i = k

    For several labels, give a distribution over them: the paper's loss is the mean over the labels.

    Use when:
        K is in the hundreds: the cost hardly depends on it. Or k is no whole number.

    Avoid when:
        K is below a hundred: ``topk_nll`` is the exact likelihood of the label being in the top-k set.

    Args:
        k: how many classes are chosen, 0 < k < n; it may be any real number.
        tau: temperature, positive; towards 0 the weights become the hard top-k. The paper's alpha is 1 / tau.
        weight, reduction, label_smoothing, ignore_index: as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> SoftTopK(k=2)(torch.zeros(1, 4), torch.tensor([0]))
        tensor(0.6931)

    Reference: Gupta, Khatri, Rawat, Bhojanapalli, Jain, Dhillon. Dual-Encoders for Extreme Multi-label Classification.
    ICLR 2024.
    """

    def row_loss(self, logits: Tensor) -> RowLoss:
        return soft_topk_rows(self.k, tau=self.tau)
