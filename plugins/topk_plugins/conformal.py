"""Training for small prediction sets: Stutz et al. 2022, and the low-variance version of Noorani et al. 2025."""

from typing import ClassVar

import torch
from torch import Tensor

from topk_registry import BatchLoss
from topk_registry.options import integer, number

ROUNDED = 1 + 2**-50  # exceeds the rounding error of alpha times a number of rows
LEAST = 1e-8  # added before the logarithm, as in the authors' code


class ConformalTraining(BatchLoss):
    r"""Size of conformal prediction sets. One half of each batch calibrates the sets, and the other half gets the sets.

    .. math:: L = \log \frac1{|P|} \sum_{i \in P} \Bigl(1 - C_{y_i} +
        \lambda \bigl(\textstyle\sum_c C_c - \kappa\bigr)_+\Bigr) + \mu \, \text{cross-entropy}, \qquad
        C_c = \operatorname{sigmoid} \frac{\log p_c(x_i) - q}{\tau}

    P is the predicted half. q is the conformal quantile of the m rows of the half that calibrates: the r-th smallest
    :math:`\log p_{y_j}(x_j)`, where :math:`r = \lfloor \alpha (m + 1) \rfloor`, at least 1. The score of the true class
    exceeds q for at least a share of 1 - alpha of new images. C is the smoothed prediction set with the score ``lac``.
    The loss penalizes large sets and sets that miss the label.

    The gradient of q is the gradient of the row at the quantile. If ``neighbours`` is above 1, the gradient is the mean
    over the rows with scores nearest to q. This mean has less variance and a small bias
    (``conformal_training_low_variance``).

    The loss is defined on a whole batch. There is no loss per row, and class weights, mixup and label smoothing are not
    supported. With several processes, the quantile is over the rows of all processes. If all rows of one half are
    ignored, the loss is NaN.

    Use when:
        The model will return conformal prediction sets, and their mean size matters. In the study here on feature
        vectors, sets were as large as with cross-entropy (3.52 and 3.52 classes).

    Avoid when:
        A batch has fewer than 2 / alpha rows, because the quantile is then the lowest score. Training starts from
        random weights, because all sets then have similar sizes: start from a trained model or add cross-entropy.

    Args:
        alpha: miscoverage, the share of labels that sets may miss, above 0 and below 1.
        tau: temperature of the sigmoid that smooths the sets, positive.
        kappa: set size without a penalty, at least 0.
        size_weight: lambda, the weight of the size.
        cross_entropy_weight: mu, the weight of the cross-entropy term.
        calibration: share of the rows of a batch that calibrate. These are the first rows.
        neighbours: number of rows over which the gradient of the quantile is averaged.
        ignore_index: rows with this label do not affect the loss.

    Shape: logits [B, n], labels [B] -> [].

    Example:
        >>> loss = create_loss("conformal_training", alpha=0.1)
        >>> loss(torch.randn(64, 10, requires_grad=True), torch.arange(64) % 10).backward()

    Reference: Stutz, Dvijotham, Cemgil, Doucet 2022; Noorani, Romero, Dal Fabbro, Hassani, Pappas 2025.
    """

    option_ranges: ClassVar = {
        "alpha": "(0, 1)", "tau": "(0, inf)", "kappa": "[0, inf)", "size_weight": "[0, inf)",
        "cross_entropy_weight": "[0, inf)", "calibration": "(0, 1)", "neighbours": "[1, inf)",
    }  # fmt: skip
    tuning_grid: ClassVar = {"size_weight": (0.1, 1.0), "tau": (0.1, 1.0)}

    def __init__(
        self,
        *,
        alpha: float = 0.1,
        tau: float = 1.0,
        kappa: float = 1.0,
        size_weight: float = 0.1,
        cross_entropy_weight: float = 0.0,
        calibration: float = 0.5,
        neighbours: int = 1,
        ignore_index: int = -100,
    ) -> None:
        super().__init__(ignore_index=ignore_index)
        self.alpha = number(alpha, "alpha", above=0, below=1)
        self.tau = number(tau, "tau", above=0)
        self.kappa = number(kappa, "kappa", at_least=0)
        self.size_weight = number(size_weight, "size_weight", at_least=0)
        self.cross_entropy_weight = number(cross_entropy_weight, "cross_entropy_weight", at_least=0)
        self.calibration = number(calibration, "calibration", above=0, below=1)
        self.neighbours = integer(neighbours, "neighbours", at_least=1)

    def of_batch(self, logits: Tensor, label: Tensor, counted: Tensor) -> Tensor:
        scores = logits.log_softmax(-1)
        own = scores.gather(1, label[:, None])[:, 0]
        first = min(max(1, int(self.calibration * len(own))), len(own) - 1)
        quantile = self.quantile(self.all_rows(own[:first]), self.all_rows(counted[:first]))
        edges = torch.sigmoid((scores[first:] - quantile) / self.tau)
        missed = torch.sigmoid((quantile - own[first:]) / self.tau)
        cost = missed + self.size_weight * (edges.sum(-1) - self.kappa).clamp(min=0)
        value = (self._mean(cost, counted[first:]) + LEAST).log()
        if self.cross_entropy_weight:
            value = value - self.cross_entropy_weight * self._mean(own, counted)
        return value

    def quantile(self, own: Tensor, counted: Tensor) -> Tensor:
        """Return the conformal quantile [] of valid label scores [m], with the mean gradient of the nearest scores."""
        known = own.detach().masked_fill(~counted, torch.inf)
        count = counted.sum()
        # compensates for binary rounding: 0.21 * 300 is 63, not 62.99999
        rank = ((count + 1).double() * (self.alpha * ROUNDED)).long()
        rank = torch.minimum(rank, count).clamp(min=1)
        value = known.sort().values.gather(0, (rank - 1)[None])[0]
        _, nearest = (known - value).abs().topk(min(self.neighbours, len(own)), largest=False)
        part = counted[nearest].to(own)
        mean = (own[nearest] * part).sum() / part.sum()
        return value + mean - mean.detach()

    def _mean(self, rows: Tensor, counted: Tensor) -> Tensor:
        rows, counted = self.all_rows(rows), self.all_rows(counted)
        return rows.masked_fill(~counted, 0.0).sum() / counted.sum()

    def extra_repr(self) -> str:
        return (
            f"alpha={self.alpha:g}, tau={self.tau:g}, kappa={self.kappa:g}, size_weight={self.size_weight:g}, "
            f"cross_entropy_weight={self.cross_entropy_weight:g}, neighbours={self.neighbours}"
        )


class LowVarianceConformalTraining(ConformalTraining):
    r"""``conformal_training`` with a low-variance gradient of the quantile: the mean over several rows.

    .. math:: \nabla q \approx \frac1N \sum_{j \in \text{nearest}} \nabla \log p_{y_j}(x_j)

    The mean is over N rows of the half that calibrates: the rows whose scores are nearest to the quantile q. Everything
    else is as in :class:`ConformalTraining`.

    Use when:
        You train for small sets with small batches, in which the gradient of a single row is noisy. In the study here
        on feature vectors, this loss did not differ from ``conformal_training``.

    Avoid when:
        A batch has only a few more than N rows: the mean then includes rows far from the quantile.

    Args:
        alpha, tau, kappa, size_weight, cross_entropy_weight, calibration, ignore_index: as ``conformal_training``.
        neighbours: N, the number of rows over which the gradient of the quantile is averaged.

    Shape: logits [B, n], labels [B] -> [].

    Example:
        >>> loss = create_loss("conformal_training_low_variance", alpha=0.1, neighbours=4)
        >>> loss(torch.randn(64, 10, requires_grad=True), torch.arange(64) % 10).backward()

    Reference: Noorani, Romero, Dal Fabbro, Hassani, Pappas 2025.
    """

    estimates_gradient = True

    def __init__(
        self,
        *,
        alpha: float = 0.1,
        tau: float = 1.0,
        kappa: float = 1.0,
        size_weight: float = 0.1,
        cross_entropy_weight: float = 0.0,
        calibration: float = 0.5,
        neighbours: int = 8,
        ignore_index: int = -100,
    ) -> None:
        super().__init__(
            alpha=alpha,
            tau=tau,
            kappa=kappa,
            size_weight=size_weight,
            cross_entropy_weight=cross_entropy_weight,
            calibration=calibration,
            neighbours=neighbours,
            ignore_index=ignore_index,
        )
