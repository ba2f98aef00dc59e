"""Metrics of several labels per image: mean average precision, F1, exact match and top-k recall.

Average precision needs the scores of all samples at once, so that they are kept, in single precision, until
``compute``; everything else is a few sums.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch import distributed as dist

from topk_registry.metrics.streaming import StreamingMetric, ratio, set_sizes

__all__ = ["LabelSetMetrics", "average_precision"]


class LabelSetMetrics(StreamingMetric):
    """Metrics of logits and k-hot targets, under timm's names where timm has them.

    =============== ========================================================================================
    ``map``         mean over classes of the average precision; classes without a positive sample left out
    ``micro_f1``    F1 over all pairs of a sample and a class
    ``macro_f1``    mean over classes of their F1
    ``sample_f1``   mean over samples of their F1
    ``exact_match`` share of samples whose predicted set is the set of labels
    ``top5_recall`` mean over samples with labels of the share of labels among the 5 best classes
    ``bce``         binary cross-entropy, mean over samples and classes
    =============== ========================================================================================

    A class is predicted where the sigmoid of its logit reaches ``threshold``. An F1 without labels and without
    predictions is 0, as in scikit-learn and timm. Tied scores are one threshold of average precision, and share their
    places in the top k: with one label each, top-k recall is the top-k accuracy of :class:`TopKAccuracy`. A score that
    is NaN counts as the wrong one. Targets are 0 or 1; others count as labels from 0.5 on, and in ``bce`` as they are.

    Args:
        num_classes: n.
        k: set sizes of top-k recall.
        threshold: the probability from which a class is predicted; one number, or one a class [n].
        device: device of the sums at the start; they follow the logits. Needed with NCCL if a rank may see no batch.

    Example:
        >>> metric = LabelSetMetrics(3, k=1)
        >>> metric.update(torch.tensor([[2.0, -1.0, 1.0], [-2.0, 1.0, -3.0]]), torch.tensor([[1, 0, 1], [0, 1, 0]]))
        >>> {name: round(value, 3) for name, value in metric.compute().items() if name != "bce"}
        {'map': 1.0, 'micro_f1': 1.0, 'macro_f1': 1.0, 'sample_f1': 1.0, 'exact_match': 1.0, 'top1_recall': 0.75}
    """

    def __init__(
        self,
        num_classes: int,
        *,
        k: int | Sequence[int] = (1, 5),
        threshold: float | Tensor = 0.5,
        device: torch.device | str | None = None,
    ) -> None:
        self.n, self.k, self.threshold = num_classes, set_sizes(k), torch.as_tensor(threshold)
        if not bool(((self.threshold > 0) & (self.threshold < 1)).all()):
            raise ValueError(f"threshold must be in (0, 1), got {threshold}")
        if self.threshold.ndim > 1 or self.threshold.numel() not in (1, num_classes):
            raise ValueError(
                f"threshold must be one number or one a class, got {list(self.threshold.shape)} for {num_classes} "
                "classes"
            )
        self._kept: list[tuple[Tensor, Tensor]] = []
        zero = torch.zeros((), dtype=torch.float64, device=device)
        classes = torch.zeros(num_classes, dtype=torch.int64, device=device)
        super().__init__(
            right=classes,
            claimed=classes,
            true=classes,
            sample_f1=zero,
            exact=zero,
            recall=torch.zeros(len(self.k), dtype=torch.float64, device=device),
            labelled=zero,
            bce=zero,
            seen=zero,
        )

    def reset(self) -> None:
        super().reset()
        self._kept.clear()

    def update(self, logits: Tensor, target: Tensor) -> None:
        """Count a batch of logits [B, n] with targets [B, n]."""
        if logits.ndim != 2 or logits.shape[1] != self.n or target.shape != logits.shape:
            raise ValueError(
                f"expected logits and targets [batch, {self.n}], got {list(logits.shape)} and {list(target.shape)}"
            )
        self.follow(logits)
        logits, sums = logits.detach().float(), self.sums
        labels = target >= 0.5
        scores = torch.where(logits.isnan(), torch.where(labels, -math.inf, math.inf), logits)
        claimed = scores.sigmoid() >= self.threshold.to(logits.device)
        right = claimed & labels
        counts = [each.sum(1) for each in (right, claimed, labels)]
        for name, each in zip(("right", "claimed", "true"), (right, claimed, labels), strict=True):
            sums[name] += each.sum(0)
        of_samples = 2 * counts[0].to(sums["sample_f1"].dtype) / (counts[1] + counts[2]).clamp(min=1)
        sums["sample_f1"] += of_samples.sum()
        sums["exact"] += (claimed == labels).all(1).sum()
        loss = nn.functional.binary_cross_entropy_with_logits(logits, target.to(logits), reduction="none")
        sums["bce"] += loss.to(sums["bce"].dtype).mean(1).sum()
        sums["seen"] += len(logits)
        sums["recall"] += torch.stack([self._recall(scores, labels, k) for k in self.k])
        sums["labelled"] += (counts[2] > 0).sum()
        self._kept.append((scores.cpu(), labels.cpu()))

    def compute(self, *, sync: bool = True) -> dict[str, float]:
        """See :meth:`StreamingMetric.compute`. Every rank gets the scores of all."""
        return {"map": self._mean_average_precision(sync=sync), **super().compute(sync=sync)}

    def ratios(self, totals: dict[str, Tensor]) -> dict[str, float]:
        right, claimed, true = (totals[name].double() for name in ("right", "claimed", "true"))
        seen = totals["seen"]
        of_classes = 2 * right / (claimed + true).clamp(min=1)
        both = (claimed + true).sum()
        return {
            "micro_f1": (2 * right.sum() / both.clamp(min=1)).item() if seen else math.nan,
            "macro_f1": of_classes.mean().item() if seen else math.nan,
            "sample_f1": ratio(totals["sample_f1"], seen),
            "exact_match": ratio(totals["exact"], seen),
            **{
                f"top{k}_recall": ratio(value, totals["labelled"])
                for k, value in zip(self.k, totals["recall"], strict=True)
            },
            "bce": ratio(totals["bce"], seen),
        }

    def _recall(self, scores: Tensor, labels: Tensor, k: int) -> Tensor:
        """The sum over samples of the share of their labels in the top k, ties shared."""
        if k >= self.n:
            return labels.any(1).sum().to(self.sums["recall"].dtype)
        last = scores.topk(k).values[:, -1:]
        above, tied = scores > last, scores == last
        room = (k - above.sum(1)) / tied.sum(1).clamp(min=1)
        hits = (above & labels).sum(1) + room * (tied & labels).sum(1)
        return (hits.to(self.sums["recall"].dtype) / labels.sum(1).clamp(min=1)).sum()

    def _mean_average_precision(self, *, sync: bool) -> float:
        every = [self._kept]
        if sync and dist.is_available() and dist.is_initialized():
            every = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(every, self._kept)
        rows = [row for each in every for row in each]
        if not rows:
            return math.nan
        precisions = average_precision(*(torch.cat(parts) for parts in zip(*rows, strict=True)))
        return precisions.nanmean().item()


def average_precision(scores: Tensor, labels: Tensor) -> Tensor:
    """The average precision of each class [n], NaN for a class without a positive sample.

    The precision at each threshold, weighted by the recall that the threshold adds; tied scores are one threshold. It
    is scikit-learn's ``average_precision_score`` of each column.

    Args:
        scores: of samples and classes [N, n], none of them NaN.
        labels: which classes each sample has [N, n], boolean.

    Example:
        >>> average_precision(torch.tensor([[0.9], [0.8], [0.7]]), torch.tensor([[True], [False], [True]]))
        tensor([0.8333], dtype=torch.float64)
    """
    if scores.ndim != 2 or labels.shape != scores.shape or labels.dtype != torch.bool:
        raise ValueError(
            f"expected scores [N, n] and boolean labels of the same shape, got {list(scores.shape)} and {labels.dtype} "
            f"{list(labels.shape)}"
        )
    columns = [_of_class(scores[:, c], labels[:, c]) for c in range(scores.shape[1])]
    return torch.tensor(columns, dtype=torch.float64)


def _of_class(scores: Tensor, labels: Tensor) -> float:
    if not labels.any():
        return math.nan
    order = scores.argsort(descending=True)
    ranked = scores[order]
    ends = torch.cat([(ranked[1:] != ranked[:-1]).nonzero()[:, 0], order.new_tensor([len(order) - 1])])
    hits = labels[order].cumsum(0)[ends]  # until the last of each group of ties
    new = torch.diff(hits, prepend=hits.new_zeros(1))
    return ((new * hits).to(torch.float64) / (ends + 1)).sum().item() / hits[-1].item()
