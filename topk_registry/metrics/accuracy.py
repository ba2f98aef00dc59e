"""Top-k accuracy: over all samples, and as a mean over classes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from topk_registry.metrics.streaming import Device, StreamingMetric, checked_labels, ratio, set_sizes

MANY, FEW = 100, 20  # numbers of training samples that divide classes into groups, as in ImageNet-LT (Liu et al. 2019)


class TopKAccuracy(StreamingMetric):
    """Top-k accuracy for one or several k: over all samples, over classes, and over frequent and rare classes.

    The results for k = 5 have the following names, and likewise for every other k.

    - ``top5``: share of samples whose label is among the five classes with the highest logits
    - ``macro_top5``: mean over classes of the accuracy within the class, without classes that have no samples (Garcin
      et al. 2022)
    - ``many_top5``, ``medium_top5``, ``few_top5``: the same mean over the classes with more than 100, with 20 to 100,
      and with fewer than 20 training samples. These results require ``class_counts``.

    If several logits are equal, their order is treated as random. Let A be the number of logits above the label's
    logit, and let B be the number of logits equal to the label's logit (at least 1). Then the sample counts as
    (k - A) / B hits, clamped to [0, 1]. So if all logits are equal, the result is k / n. A NaN logit of another class
    counts as above the label's logit. If the label's logit is NaN, the sample counts as 0 hits.

    Args:
        k: one k, or several. If k is at least the number of classes, every sample without NaN is a hit.
        num_classes: number of classes n.
        class_counts: number of training samples of each class: [n].
        ignore_index: a sample with this label does not count.
        device: initial device of the sums. An update moves the sums to the device of the logits. In a distributed run
            with NCCL, pass the GPU of the rank if the rank might get no batch.

    Example:
        >>> metric = TopKAccuracy((1, 2), num_classes=3)
        >>> metric.update(torch.tensor([[0.2, 0.9, 0.5], [0.2, 0.9, 0.5]]), torch.tensor([1, 2]))
        >>> metric.compute()
        {'top1': 0.5, 'macro_top1': 0.5, 'top2': 1.0, 'macro_top2': 1.0}
    """

    def __init__(
        self,
        k: int | Sequence[int] = (1, 5),
        *,
        num_classes: int,
        class_counts: Tensor | Sequence[int] | None = None,
        ignore_index: int = -100,
        device: Device = None,
    ) -> None:
        self.k, self.n, self.ignore_index = set_sizes(k), num_classes, ignore_index
        self.groups = {"macro": torch.ones(num_classes, dtype=torch.bool)}
        if class_counts is not None:
            counts = torch.as_tensor(class_counts).cpu()
            if len(counts) != num_classes:
                raise ValueError(f"expected class_counts [{num_classes}], got {list(counts.shape)}")
            many, few = counts > MANY, counts < FEW
            self.groups |= {"many": many, "medium": ~many & ~few, "few": few}
        zero = torch.zeros(num_classes, dtype=torch.float64, device=device)
        super().__init__(hits=zero.repeat(len(self.k), 1), seen=zero)

    def update(self, logits: Tensor, target: Tensor) -> None:
        """Add a batch: logits [B, n] and labels [B]."""
        labels = checked_labels(logits, target, self.ignore_index)
        if logits.shape[1] != self.n:
            raise ValueError(f"the metric has {self.n} classes, logits have {logits.shape[1]}")
        self.follow(logits)
        hits, seen = self.sums["hits"], self.sums["seen"]
        valid = labels != self.ignore_index
        label = torch.where(valid, labels, 0)
        own = logits.detach().gather(1, label[:, None])
        above = (~(logits <= own)).sum(1).to(hits.dtype)  # not logits > own, so that NaN counts as above
        tied = (logits == own).sum(1).to(hits.dtype)  # 0 if the label's logit is NaN
        credit = torch.stack([torch.minimum((size - above).clamp(min=0), tied) for size in self.k]) / tied.clamp(min=1)
        hits.index_add_(1, label, valid * credit)
        seen.index_add_(0, label, valid.to(seen.dtype))

    def ratios(self, totals: dict[str, Tensor]) -> dict[str, float]:
        hits, seen = totals["hits"], totals["seen"]
        results = {}
        for k, hit in zip(self.k, hits, strict=True):
            results[f"top{k}"] = ratio(hit.sum(), seen.sum())
            for name, group in self.groups.items():
                present = group & (seen > 0)
                results[f"{name}_top{k}"] = ratio((hit[present] / seen[present]).sum(), present.sum())
        return results
