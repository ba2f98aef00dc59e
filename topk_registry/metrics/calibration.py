"""Calibration error of top-k marginals: predicted probabilities that a class is among the k right answers."""

import torch
from torch import Tensor

from topk_registry.metrics.streaming import Device, StreamingMetric, checked_labels, ratio, set_sizes


class MarginalCalibration(StreamingMetric):
    """Calibration error of top-k marginals.

    Each sample x has k right answers: a set S(x) of k classes. The marginal pi_i(x) is the predicted probability that
    class i is in S(x). Marginals are calibrated if class i is in S(x) for 30 % of the pairs (x, i) with a marginal
    close to 0.3, and likewise for every other number. The metric groups all pairs into bins b by marginal. The error is

        calibration_error = sum_b | sum_{(x, i) in b} (1[i in S(x)] - pi_i(x)) | / sum_{(x, i)} pi_i(x),

    where 1[condition] is 1 if the condition holds, and 0 otherwise. Calibrated marginals have the error 0. If k = 1,
    the error is n times the classwise calibration error of softmax.

    If the target is [B, n] with zeros and ones, S(x) contains the classes with 1. If the target is [B], each sample has
    only one label y. The metric treats y as a random class of S(x), and replaces 1[i in S(x)] by k 1[i = y], because
    both have the same mean. Then the marginals pi_i(x) = k P(y = i | x) are calibrated. If P(y = i | x) is
    above 1 / k, no model can predict k P(y = i | x), because a marginal is at most 1.

    For a reliability diagram, ``metric.sums`` has three tensors with one number per bin: ``entries`` is the number of
    pairs, ``predicted`` the sum of their marginals, and ``observed`` the sum of 1[i in S(x)].

    Args:
        k: number of classes in the set.
        bins: number of bins of equal width in [0, 1].
        ignore_index: a sample with this label does not count.
        device: initial device of the sums (with NCCL, the rank's GPU). An update moves them to the marginals' device.

    Example:
        >>> metric = MarginalCalibration(k=2)
        >>> metric.update(torch.tensor([[1.0, 0.5, 0.5]] * 2), torch.tensor([[1, 1, 0], [1, 0, 1]]))
        >>> metric.compute()
        {'calibration_error': 0.0}
    """

    def __init__(self, k: int, *, bins: int = 15, ignore_index: int = -100, device: Device = None) -> None:
        (self.k,) = set_sizes([k])
        if bins < 1:
            raise ValueError(f"bins must be at least 1, got {bins!r}")
        self.ignore_index, self.edges = ignore_index, torch.arange(1, bins, dtype=torch.float64) / bins
        zero = torch.zeros(bins, dtype=torch.float64, device=device)
        super().__init__(predicted=zero, observed=zero, entries=zero)

    def update(self, marginals: Tensor, target: Tensor) -> None:
        """Add a batch: marginals [B, n], and a target that is either labels [B] or zeros and ones [B, n]."""
        if target.shape == marginals.shape:
            members = target.float()
        else:
            labels = checked_labels(marginals, target, self.ignore_index)[:, None]
            ignored = labels == self.ignore_index
            members = torch.zeros_like(marginals, dtype=torch.float32)
            members.scatter_(1, labels.masked_fill(ignored, 0), self.k).masked_fill_(ignored, torch.nan)
        self.follow(marginals)
        counted = members.isfinite().flatten()
        p = marginals.detach().flatten().to(self.sums["predicted"].dtype)
        b = torch.bucketize(p, self.edges.to(p))
        for name, values in (("predicted", p), ("observed", members.flatten()), ("entries", torch.ones_like(p))):
            self.sums[name].index_add_(0, b, torch.where(counted, values, 0).to(p.dtype))

    def ratios(self, totals: dict[str, Tensor]) -> dict[str, float]:
        predicted, observed = totals["predicted"], totals["observed"]
        return {"calibration_error": ratio((observed - predicted).abs().sum(), predicted.sum())}


class ExpectedCalibrationError(MarginalCalibration):
    """Expected calibration error (ECE) of the class with the highest softmax probability (Guo et al. 2017).

    The metric groups the samples into bins b by their highest probability p. With 1[hit] = 1 if the class with this
    probability is the label, and 0 otherwise, the error of N samples is

        ece = sum_b | sum_{x in b} (1[hit] - p(x)) | / N.

    Args:
        bins, ignore_index, device: as in :class:`MarginalCalibration`.

    Example:
        >>> metric = ExpectedCalibrationError()
        >>> metric.update(torch.tensor([[0.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1]))
        >>> metric.compute()
        {'ece': 0.0}
    """

    def __init__(self, *, bins: int = 15, ignore_index: int = -100, device: Device = None) -> None:
        super().__init__(1, bins=bins, ignore_index=ignore_index, device=device)

    def update(self, logits: Tensor, target: Tensor) -> None:
        """Add a batch: logits [B, n] and labels [B]."""
        labels = checked_labels(logits, target, self.ignore_index)
        dtype = torch.promote_types(logits.dtype, torch.float32)  # half precision would move values between bins
        highest, predicted = logits.softmax(1, dtype=dtype).max(1, keepdim=True)
        hits = (predicted[:, 0] == labels).float().masked_fill(labels == self.ignore_index, torch.nan)
        super().update(highest, hits[:, None])

    def ratios(self, totals: dict[str, Tensor]) -> dict[str, float]:
        return {"ece": ratio((totals["observed"] - totals["predicted"]).abs().sum(), totals["entries"].sum())}
