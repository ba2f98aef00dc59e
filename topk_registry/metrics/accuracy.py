"""Top-k accuracy over samples, classes and groups of classes.

Every metric is a few sums. ``update`` adds a batch to them without waiting for the device, ``compute`` adds them over
ranks and divides; logits are never kept.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from topk_registry.metrics.streaming import StreamingMetric, check_labels, ratio, set_sizes

__all__ = ["TopKAccuracy"]


class TopKAccuracy(StreamingMetric):
    """Top-k accuracy for several k at once: over samples, over classes, and over frequent and rare classes.

    Results are named ``top5`` (share of samples), ``macro_top5`` (mean of the classes' own shares, classes without
    samples left out) and, with ``class_counts``, ``many_top5``, ``medium_top5``, ``few_top5``: the same mean over
    classes with more than ``many``, with ``few`` to ``many``, with fewer than ``few`` training samples.

    Tied scores share their places: with a scores above the label's and b equal to it (its own included), the label is
    in the top k with credit (k - a) / b, cut to [0, 1], which is its chance under random tie-breaking. So constant
    scores get k / n. A NaN counts as above every label, and a label whose own score is NaN is missed.

    Args:
        k: one set size or several. Beyond the number of classes it is always a hit.
        num_classes: n; not needed with ``class_counts``.
        class_counts: the number of training samples of each class [n].
        many, few: the limits of the split; the defaults are those of ImageNet-LT.
        ignore_index: rows with this label do not count.
        device: device of the sums at the start; they follow the logits. Needed with NCCL if a rank may see no batch.

    Example:
        >>> metric = TopKAccuracy((1, 2), num_classes=3)
        >>> metric.update(torch.tensor([[0.2, 0.9, 0.5], [0.2, 0.9, 0.5]]), torch.tensor([1, 2]))
        >>> metric.compute()
        {'top1': 0.5, 'macro_top1': 0.5, 'top2': 1.0, 'macro_top2': 1.0}

    Reference: Garcin et al. 2022 (macro-average top-k accuracy); Liu et al. 2019, *Large-Scale Long-Tailed Recognition
    in an Open World* (the split).
    """

    def __init__(
        self,
        k: int | Sequence[int] = (1, 5),
        *,
        num_classes: int | None = None,
        class_counts: Tensor | Sequence[int] | None = None,
        many: int = 100,
        few: int = 20,
        ignore_index: int = -100,
        device: torch.device | str | None = None,
    ) -> None:
        self.k = set_sizes(k)
        n, self.groups = class_groups(num_classes, class_counts, many, few)
        self.ignore_index = ignore_index
        super().__init__(
            hits=torch.zeros(len(self.k), n, dtype=torch.float64, device=device),
            seen=torch.zeros(n, dtype=torch.int64, device=device),
        )

    def update(self, logits: Tensor, target: Tensor) -> None:
        """Count a batch of scores [B, n] with labels [B]."""
        check_labels(logits, target, self.ignore_index)
        n = self.sums["seen"].numel()
        if logits.shape[1] != n:
            raise ValueError(f"the metric has {n} classes, logits have {logits.shape[1]}")
        target = target.long()  # an ignore_index of -100 would be compared with bytes as 156
        logits, label = logits.detach(), torch.where(target != self.ignore_index, target, 0)
        own = logits.gather(1, label[:, None])
        above = (~(logits <= own)).sum(1)  # so that NaN counts as above
        self.update_places(above, (logits == own).sum(1), target)

    def update_places(self, above: Tensor, tied: Tensor, target: Tensor) -> None:
        """Count a batch by the places of its labels [B]: how many scores are above a label's, and equal to it."""
        self.follow(above)
        valid = target != self.ignore_index
        label = torch.where(valid, target, 0)
        hits, seen = self.sums["hits"], self.sums["seen"]
        # Apple's devices have no float64, which follow() knows
        above, tied = above.to(hits.dtype), tied.to(hits.dtype).clamp(min=1)
        credit = torch.stack([((size - above) / tied).clamp(0, 1) for size in self.k])  # [len(k), B]
        hits.index_add_(1, label, valid * credit)
        seen.index_add_(0, label, valid.to(seen.dtype))

    def ratios(self, totals: dict[str, Tensor]) -> dict[str, float]:
        hits, seen = totals["hits"], totals["seen"]
        results = {}
        for k, hit in zip(self.k, hits, strict=True):
            results[f"top{k}"] = ratio(hit.sum(), seen.sum())
            for name, group in {"macro": torch.ones_like(seen, dtype=torch.bool), **self.groups}.items():
                present = group & (seen > 0)
                results[f"{name}_top{k}"] = ratio((hit[present] / seen[present]).sum(), present.sum())
        return results


def class_groups(
    num_classes: int | None, class_counts: Tensor | Sequence[int] | None, many: int, few: int
) -> tuple[int, dict[str, Tensor]]:
    """Return the number of classes, and masks [n] of those with many, a medium number of and few training samples."""
    counts = None if class_counts is None else torch.as_tensor(class_counts).cpu()
    n = num_classes if counts is None else counts.numel()
    if n is None or num_classes not in (None, n):
        raise ValueError(f"expected num_classes, or class_counts of as many entries, got {num_classes} and {n}")
    return n, {} if counts is None else _shots(counts, many, few)


def _shots(counts: Tensor, many: int, few: int) -> dict[str, Tensor]:
    if not 0 <= few <= many:
        raise ValueError(f"expected 0 <= few <= many, got few = {few} and many = {many}")
    return {"many": counts > many, "medium": (counts >= few) & (counts <= many), "few": counts < few}
