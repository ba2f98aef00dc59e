"""What sets of several labels miss, and how large they are: sums over evaluated samples."""

import math
from dataclasses import dataclass, fields

import numpy as np

from topk_studies.old_trainer.oldsets.risk import check_targets
from topk_studies.old_trainer.oldsets.scores import Array, as_numpy


@dataclass(frozen=True)
class LabelCounts:
    """Sums over evaluated samples of several labels, from which everything else follows.

    Args:
        losses, squares: the sum of the samples' false negative rates, and of their squares. A sample without labels has
            a rate of 0.
        unlabelled: samples without labels.
        sizes: how many sets have each size [n + 1].
        hits, seen, chosen: of each class: labels that sets hold, labels, and sets that hold it [n].
    """

    losses: float
    squares: float
    unlabelled: int
    sizes: np.ndarray
    hits: np.ndarray
    seen: np.ndarray
    chosen: np.ndarray

    @classmethod
    def of(cls, sets: Array, targets: Array) -> "LabelCounts":
        """The sums of sets bool [B, n] and targets of 0 and 1 [B, n]."""
        inside, labels = as_numpy(sets).astype(bool), check_targets(as_numpy(targets))
        if inside.ndim != 2 or inside.shape != labels.shape:
            raise ValueError(f"expected sets and targets [B, n], got {list(inside.shape)} and {list(labels.shape)}")
        losses, count = false_negative_rates(inside, labels), labels.sum(-1)
        return cls(
            float(losses.sum()),
            float((losses**2).sum()),
            int((count == 0).sum()),
            np.bincount(inside.sum(-1), minlength=inside.shape[1] + 1),
            (inside & labels).sum(0),
            labels.sum(0),
            inside.sum(0),
        )

    def __add__(self, other: "LabelCounts") -> "LabelCounts":
        return LabelCounts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def total(self) -> int:
        return int(self.sizes.sum())

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 percent interval of the mean false negative rate, by the normal law of a mean of many samples."""
        mean = self.losses / self.total
        spread = math.sqrt(max(0.0, self.squares / self.total - mean**2) / self.total)
        return max(0.0, mean - 1.96 * spread), min(1.0, mean + 1.96 * spread)

    def summary(self) -> dict[str, float]:
        """Rates and sizes by name; NaN where there is nothing to divide by.

        ``false_negative_rate`` (mean over samples), ``mean_size``, ``median_size``, ``empty`` (share of sets without a
        class), ``macro_recall`` and ``worst_class_recall`` (over classes with labels), ``macro_f1`` (over the same) and
        ``micro_f1``.
        """
        if not self.total:
            return {}
        sizes = np.arange(len(self.sizes))
        seen = self.seen > 0
        recall = self.hits[seen] / self.seen[seen]
        f1 = 2 * self.hits[seen] / (self.seen[seen] + self.chosen[seen])
        both = int(self.seen.sum() + self.chosen.sum())
        values = {
            "false_negative_rate": self.losses / self.total,
            "mean_size": (sizes * self.sizes).sum() / self.total,
            "median_size": float(np.searchsorted(np.cumsum(self.sizes), self.total / 2)),
            "empty": self.sizes[0] / self.total,
            "macro_recall": recall.mean() if seen.any() else math.nan,
            "worst_class_recall": recall.min() if seen.any() else math.nan,
            "macro_f1": f1.mean() if seen.any() else math.nan,
            "micro_f1": 2 * self.hits.sum() / both if both else math.nan,
        }
        return {name: float(value) for name, value in values.items()}


def false_negative_rates(sets: Array, targets: Array) -> np.ndarray:
    """The share of each row's labels that its set misses [B]; 0 for a row without labels."""
    inside, labels = as_numpy(sets).astype(bool), check_targets(as_numpy(targets))
    count = labels.sum(-1)
    return (labels & ~inside).sum(-1) / np.maximum(count, 1)
