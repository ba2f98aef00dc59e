"""Losses for small prediction sets: sets of classes that contain the label with a chosen probability (Stutz 2022)."""

from typing import Annotated, ClassVar

import torch
from torch import Tensor

from topk_registry import BatchLoss

ROUNDED = 1 + 2**-50  # alpha times a number of rows times ROUNDED is never rounded down below an integer
LEAST = 1e-8  # added before the logarithm, as in the authors' code


class ConformalTraining(BatchLoss):
    """Size of prediction sets: sets of classes that contain the label with a probability of about 1 - alpha.

        L = log(mean over i in P of (1 - C_i(y_i) + lambda (sum_c C_i(c) - kappa)_+)) + mu cross-entropy,
        C_i(c) = sigmoid((log p_i(c) - q) / tau)

    The prediction set of row i has all classes c whose log-probability log p_i(c) is at least a threshold q. Here p_i
    is the softmax of the logits of row i, and y_i is the label. The loss divides each batch into two parts:

    - The m rows of the first part set the threshold: q is the r-th smallest of their m log-probabilities log p_i(y_i),
      where r = max(1, floor(alpha (m + 1))).
    - The second part has the rows P. For these rows, the loss computes smoothed prediction sets: C_i(c) is near 1 if
      class c is in the set of row i, and near 0 otherwise. The term 1 - C_i(y_i) penalizes sets that miss the label.
      The term with lambda penalizes sets of more than kappa classes, where (z)_+ is max(z, 0).

    The last term is the mean cross-entropy of all rows of the batch.

    The threshold q is the log-probability of one row, so the gradient of q is the gradient of this log-probability. If
    N = ``neighbours`` is above 1, the loss replaces this gradient by the mean gradient of the N log-probabilities
    nearest to q. The mean has a smaller variance and a small bias.

    The loss of a row depends on the other rows. Therefore there are no losses per row, and class weights, mixup and
    label smoothing are not supported. With several processes, the loss computes q from the rows of all processes. If
    all rows of one part are ignored, the loss is NaN.

    - Use when: The mean size of conformal prediction sets matters, and the model is already trained.
    - Avoid when: The first part of a batch has fewer than 1 / alpha rows, because q is then the lowest of their
      log-probabilities. Also avoid training from random weights, because all sets then have similar sizes. Start from a
      trained model or set ``cross_entropy_weight``.
    - Evidence: In this project's study on pictures, accuracy in % with clean and with noisy labels, and in parentheses
      with cross-entropy: top-5 on icons 9.7 and 5.0 (74.5 and 60.5), top-2 on Fashion-MNIST 91.1 and 87.0 (94.6 and
      91.6), top-3 on CIFAR-10N 90.9 and 85.3 (92.4 and 89.2).

    Args:
        alpha: miscoverage, the share of samples whose set may miss the label, above 0 and below 1.
        tau: temperature of the sigmoid that smooths the sets, positive.
        kappa: largest set size without a penalty, at least 0.
        size_weight: lambda, the factor of the set size, at least 0.
        cross_entropy_weight: mu, the factor of the cross-entropy, at least 0.
        calibration: fraction of the rows of a batch that form the first part, above 0 and below 1.
        neighbours: number of rows over which the gradient of q is averaged, at least 1.
        ignore_index: rows with this label do not affect the loss.

    Shape: logits [B, n], labels [B] -> [].

    Example:
        >>> loss = create_loss("conformal_training", alpha=0.1)
        >>> loss(torch.randn(64, 10, requires_grad=True), torch.arange(64) % 10).backward()

    Reference: Stutz, Dvijotham, Cemgil, Doucet. Learning Optimal Conformal Classifiers. ICLR 2022. For ``neighbours``:
    Noorani, Romero, Dal Fabbro, Hassani, Pappas 2025.
    """

    tuning_grid: ClassVar = {"size_weight": (0.1, 1.0), "tau": (0.1, 1.0)}

    def __init__(
        self,
        *,
        alpha: Annotated[float, "(0, 1)"] = 0.1,
        tau: Annotated[float, "(0, inf)"] = 1.0,
        kappa: Annotated[float, "[0, inf)"] = 1.0,
        size_weight: Annotated[float, "[0, inf)"] = 0.1,
        cross_entropy_weight: Annotated[float, "[0, inf)"] = 0.0,
        calibration: Annotated[float, "(0, 1)"] = 0.5,
        neighbours: Annotated[int, "[1, inf)"] = 1,
        ignore_index: int = -100,
    ) -> None:
        super().__init__(ignore_index=ignore_index)
        self.alpha = alpha
        self.tau = tau
        self.kappa = kappa
        self.size_weight = size_weight
        self.cross_entropy_weight = cross_entropy_weight
        self.calibration = calibration
        self.neighbours = neighbours

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
        """Return the threshold q []: a prediction set has the classes with log-probabilities of at least q.

        q is the r-th smallest of the c label log-probabilities ``own[counted]``, with r = max(1, floor(alpha (c + 1))).
        """
        known = own.detach().masked_fill(~counted, torch.inf)
        count = counted.sum()
        # ROUNDED compensates for binary rounding: 0.21 * 300 should be 63, not 62.99999
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


class LowVarianceConformalTraining(ConformalTraining):
    """``conformal_training``, a loss for small prediction sets, with a low-variance gradient of the threshold q.

        gradient of q = mean over the N nearest rows j of the gradient of log p_j(y_j)

    The prediction set of a row has all classes whose log-probability is at least q. In each batch, the fraction
    ``calibration`` of the rows determines q. The N nearest rows are the N of these rows for which log p_j(y_j), the
    log-probability of the label of row j, is nearest to q. In ``conformal_training``, the default of N is 1.

    - Use when: You train for small prediction sets with small batches, in which the gradient of one row is noisy.
    - Avoid when: The part that sets q has only a few more than N rows, because the mean then includes rows far from q.
    - Evidence: In this project's study on pictures, accuracy in % with clean and with noisy labels, and in parentheses
      with cross-entropy: top-5 on icons 28.5 and 15.9 (74.5 and 60.5), top-2 on Fashion-MNIST 92.8 and 90.7 (94.6 and
      91.6), top-3 on CIFAR-10N 91.8 and 88.2 (92.4 and 89.2).

    Args:
        alpha, tau, kappa, size_weight, cross_entropy_weight, calibration, ignore_index: as in ``conformal_training``.
        neighbours: N, the number of rows over which the gradient of q is averaged, at least 1.

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
