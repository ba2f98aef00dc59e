"""Calibration of top-k marginals: the agreement of probabilities with observed frequencies."""

import torch
from torch import Tensor

from topk_registry.metrics.streaming import Device, StreamingMetric, checked_labels, ratio, set_sizes


class MarginalCalibration(StreamingMetric):
    """Calibration error of top-k marginals: whether classes with marginal p are right answers with frequency p.

    The right answers of a sample are modeled as a random set S of k classes, with pi_i = P(i in S). All classes i of
    all samples x are grouped into bins b by their marginal. Then

        calibration_error = sum_b | sum_{(x, i) in b} 1[i in S(x)] - pi_i(x) | / sum_{(x, i)} pi_i(x)

    is the absolute difference between observed and predicted answers in each bin, relative to k answers per sample. It
    is 0 if marginals are calibrated. At k = 1, it is n times the classwise calibration error of softmax.

    If samples have k labels (a target [B, n] of zeros and ones), S is observed. If samples have one label (a target
    [B]), the label counts as a random one of the k answers, so k 1[i = y] has the mean 1[i in S]. Then the optimum of
    ``topk_nll``, pi_i = k P(y = i | x), is calibrated if no P(y = i | x) exceeds 1 / k.

    Args:
        k: set size of the marginals.
        bins: number of bins of equal width in [0, 1].
        ignore_index: rows with this label do not count.
        device: initial device of the sums. An update moves the sums to the device of the marginals.

    Example:
        >>> metric = MarginalCalibration(k=2)
        >>> metric.update(torch.tensor([[1.0, 0.5, 0.5]] * 2), torch.tensor([[1, 1, 0], [1, 0, 1]]))
        >>> metric.compute()
        {'calibration_error': 0.0}
    """

    def __init__(self, k: int, *, bins: int = 15, ignore_index: int = -100, device: Device = None) -> None:
        if not isinstance(bins, int) or bins < 1:
            raise ValueError(f"bins must be a positive integer, got {bins!r}")
        (self.k,) = set_sizes([k])
        self.ignore_index, self.edges = ignore_index, torch.arange(1, bins, dtype=torch.float64) / bins
        zero = torch.zeros(bins, dtype=torch.float64, device=device)
        super().__init__(predicted=zero, observed=zero, entries=zero)

    def update(self, marginals: Tensor, target: Tensor) -> None:
        """Add a batch of marginals [B, n], with labels [B], or with sets of answers as zeros and ones [B, n]."""
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

    def reliability(self, *, sync: bool = True) -> dict[str, list[float]]:
        """Return a reliability diagram per bin: mean ``predicted`` marginal, ``observed`` rate and ``entries``."""
        totals = self.totals(sync=sync)
        entries = totals["entries"]
        means = {name: (totals[name] / entries).tolist() for name in ("predicted", "observed")}
        return {**means, "entries": entries.tolist()}

    def ratios(self, totals: dict[str, Tensor]) -> dict[str, float]:
        predicted, observed = totals["predicted"], totals["observed"]
        return {"calibration_error": ratio((observed - predicted).abs().sum(), predicted.sum())}
