"""Metrics for samples with several labels: mean average precision, F1, exact match and top-k recall."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch import distributed as dist

from topk_registry.metrics.streaming import Device, StreamingMetric, ratio, set_sizes


class LabelSetMetrics(StreamingMetric):
    """Metrics from logits and k-hot targets (1 for each label of the sample, 0 elsewhere).

    =============== ==================================================================================================
    ``map``         mean over classes of the average precision
    ``micro_f1``    F1 over all pairs (sample, class)
    ``macro_f1``    mean over classes of the F1 of the class
    ``sample_f1``   mean over samples of the F1 of the sample
    ``exact_match`` share of samples whose predicted classes are exactly the labels
    ``top5_recall`` mean over samples of the share of labels with one of the 5 highest logits; likewise for other k
    ``bce``         mean over samples and classes of the binary cross-entropy
    =============== ==================================================================================================

    A class is predicted if the sigmoid of its logit is at least ``threshold``. Classes that are the label of no sample
    do not count in ``map``. Samples without labels do not count in ``top5_recall``. A class that is never a label and
    never predicted has F1 = 0, as in scikit-learn and timm. The same holds for a sample with no label and no predicted
    class. The order of equal logits is treated as random, as in :class:`TopKAccuracy`. If each sample has one label,
    top-k recall equals top-k accuracy. A NaN logit counts as a wrong prediction. If targets are between 0 and 1, a
    target of at least 0.5 counts as a label, but ``bce`` uses the target itself.

    Args:
        num_classes: number of classes n.
        k: one k, or several, for top-k recall.
        threshold: smallest probability with which a class is predicted.
        device: initial device of the sums (with NCCL, the rank's GPU). An update moves them to the logits' device.

    Example:
        >>> metric = LabelSetMetrics(3, k=1)
        >>> metric.update(torch.tensor([[2.0, -1.0, 1.0], [-2.0, 1.0, -3.0]]), torch.tensor([[1, 0, 1], [0, 1, 0]]))
        >>> {name: round(value, 3) for name, value in metric.compute().items() if name != "bce"}
        {'map': 1.0, 'micro_f1': 1.0, 'macro_f1': 1.0, 'sample_f1': 1.0, 'exact_match': 1.0, 'top1_recall': 0.75}
    """

    def __init__(
        self, num_classes: int, *, k: int | Sequence[int] = (1, 5), threshold: float = 0.5, device: Device = None
    ) -> None:
        if not 0 < threshold < 1:
            raise ValueError(f"threshold must be in (0, 1), got {threshold}")
        self.n, self.k, self.threshold = num_classes, set_sizes(k), threshold
        # average precision needs the logits and labels of all samples; the first entry gives the shape
        self._kept = [(torch.zeros(0, num_classes), torch.zeros(0, num_classes, dtype=torch.bool))]
        sizes = {"right": num_classes, "claimed": num_classes, "true": num_classes, "recall": len(self.k)}
        sizes |= dict.fromkeys(("sample_f1", "exact", "labelled", "bce", "seen"), ())
        super().__init__(**{name: torch.zeros(s, dtype=torch.float64, device=device) for name, s in sizes.items()})

    def reset(self) -> None:
        super().reset()
        del self._kept[1:]

    def update(self, logits: Tensor, target: Tensor) -> None:
        """Add a batch: logits [B, n] and targets [B, n]."""
        if logits.ndim != 2 or logits.shape[1] != self.n or target.shape != logits.shape:
            shapes = f"{list(logits.shape)} and {list(target.shape)}"
            raise ValueError(f"expected logits and targets [batch, {self.n}], got {shapes}")
        self.follow(logits)
        logits, sums = logits.detach().float(), self.sums
        labels, nan = target >= 0.5, logits.isnan()
        scores = torch.where(nan, torch.where(labels, -math.inf, math.inf), logits)
        claimed = scores.sigmoid() >= self.threshold
        right = claimed & labels
        for name, each in (("right", right), ("claimed", claimed), ("true", labels)):
            sums[name] += each.sum(0)
        both = (claimed.sum(1) + labels.sum(1)).clamp(min=1)
        sums["sample_f1"] += (2 * right.sum(1).to(sums["seen"].dtype) / both).sum()
        sums["exact"] += (claimed == labels).all(1).sum()
        loss = nn.functional.binary_cross_entropy_with_logits(logits, target.to(logits), reduction="none")
        sums["bce"] += loss.to(sums["bce"].dtype).mean(1).sum()
        sums["seen"] += len(logits)
        found = torch.stack([self._hits(scores, labels & ~nan, k) for k in self.k])  # [len(k), B]
        sums["recall"] += (found / labels.sum(1).clamp(min=1)).sum(1)
        sums["labelled"] += labels.any(1).sum()
        self._kept.append((scores.cpu(), labels.cpu()))

    def compute(self, *, sync: bool = True) -> dict[str, float]:
        """Return the results by name. With ``sync=True``, the ranks exchange all logits to compute ``map``."""
        every = [self._kept]
        if sync and dist.is_available() and dist.is_initialized():
            every = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(every, self._kept)
        rows = [row for each in every for row in each]
        logits, labels = (torch.cat(part) for part in zip(*rows, strict=True))
        precision = average_precision(logits, labels).nanmean().item()
        return {"map": precision, **super().compute(sync=sync)}

    def ratios(self, totals: dict[str, Tensor]) -> dict[str, float]:
        seen, both = totals["seen"], totals["claimed"] + totals["true"]
        recalls = zip(self.k, totals["recall"], strict=True)
        return {
            "micro_f1": (2 * totals["right"].sum() / both.sum().clamp(min=1)).item() if seen else math.nan,
            "macro_f1": (2 * totals["right"] / both.clamp(min=1)).mean().item() if seen else math.nan,
            "sample_f1": ratio(totals["sample_f1"], seen),
            "exact_match": ratio(totals["exact"], seen),
            **{f"top{k}_recall": ratio(value, totals["labelled"]) for k, value in recalls},
            "bce": ratio(totals["bce"], seen),
        }

    def _hits(self, logits: Tensor, labels: Tensor, k: int) -> Tensor:
        """Return the number of each sample's labels that have one of the k highest logits: [B]."""
        last = logits.topk(min(k, self.n)).values[:, -1:]
        above, tied = logits > last, logits == last
        places = ((k - above.sum(1)) / tied.sum(1)).clamp(max=1)
        return ((above & labels).sum(1) + places * (tied & labels).sum(1)).to(self.sums["recall"].dtype)


def average_precision(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the average precision of each class: [n], from logits [N, n] and boolean labels [N, n].

    The average precision of class c is the mean of one precision per sample that has the label c. This precision is the
    share of samples with the label c among all samples whose logit for c is at least as high. If no sample has the
    label c, the result for c is NaN.

    Example:
        >>> average_precision(torch.tensor([[0.9], [0.8], [0.7]]), torch.tensor([[True], [False], [True]]))
        tensor([0.8333], dtype=torch.float64)
    """
    if logits.ndim != 2 or labels.shape != logits.shape or labels.dtype != torch.bool:
        given = f"{list(logits.shape)} and {labels.dtype} {list(labels.shape)}"
        raise ValueError(f"expected logits [N, n] and boolean labels of the same shape, got {given}")
    hits = [column[label] for column, label in zip(logits.T, labels.T, strict=True)]
    precision = [_at_least(hit, hit) / _at_least(hit, column) for hit, column in zip(hits, logits.T, strict=True)]
    return torch.stack([each.mean() for each in precision])


def _at_least(logits: Tensor, others: Tensor) -> Tensor:
    """For each of the M logits, return the number of ``others`` that are at least as high: float64 [M]."""
    return (len(others) - torch.searchsorted(others.sort().values, logits)).double()
