"""Evaluation of prediction sets on labeled samples: coverage and set sizes."""

from dataclasses import dataclass

import numpy as np

from topk_registry.conformal.coverage import binomial_interval
from topk_registry.conformal.thresholds import check_labels


@dataclass(frozen=True)
class SetCounts:
    """Counts from which the coverage and the sizes of prediction sets are computed.

    The coverage is the share of samples whose set contains the label. Create one object per batch with :meth:`of`, and
    add the objects with ``+``.

    Args:
        hits: for each class, number of samples with this label whose set contains the label: [n].
        seen: for each class, number of samples with this label: [n].
        sizes: number of sets with s classes, for each size s from 0 to n: [n + 1].
    """

    hits: np.ndarray
    seen: np.ndarray
    sizes: np.ndarray

    @classmethod
    def of(cls, sets: np.ndarray, labels: np.ndarray) -> "SetCounts":
        """Return the counts for one batch of prediction sets, bool [B, n], with labels [B]."""
        inside = np.asarray(sets)
        if inside.dtype != bool or inside.ndim != 2:
            raise ValueError(f"sets must be bool [B, n], got {inside.dtype} {list(inside.shape)}")
        n = inside.shape[1]
        labels = check_labels(labels, n)
        if len(labels) != len(inside):
            raise ValueError(f"expected one label per set, got {len(labels)} for {len(inside)}")
        hit = inside[np.arange(len(labels)), labels]
        sizes = np.bincount(inside.sum(-1), minlength=n + 1)
        return cls(np.bincount(labels[hit], minlength=n), np.bincount(labels, minlength=n), sizes)

    def __add__(self, other: "SetCounts") -> "SetCounts":
        return SetCounts(self.hits + other.hits, self.seen + other.seen, self.sizes + other.sizes)

    @property
    def total(self) -> int:
        return int(self.sizes.sum())

    @property
    def interval(self) -> tuple[float, float]:
        """Exact 95 % confidence interval (low, high) of the coverage. Raises ValueError if there are no samples."""
        return binomial_interval(int(self.hits.sum()), self.total)

    @property
    def class_coverage(self) -> np.ndarray:
        """Coverage within each class: [n]. The entry of a class without samples is NaN."""
        return np.where(self.seen > 0, self.hits / np.maximum(self.seen, 1), np.nan)

    def quantile_size(self, order: int) -> int:
        """Return the ``order``-th smallest set size. ``order=1`` returns the smallest size."""
        return int(np.searchsorted(np.cumsum(self.sizes), order))

    def summary(self) -> dict[str, float]:
        """Return measures by name. Without samples, return an empty dictionary.

        - ``coverage``: share of sets that contain the label
        - ``mean_size``, ``median_size``: mean and median number of classes per set
        - ``singletons``: share of sets with exactly one class
        - ``empty``: share of sets without a class
        - ``macro_coverage``, ``worst_class_coverage``: mean and minimum of ``class_coverage`` over the classes that
          have samples
        """
        if not self.total:
            return {}
        total, present = self.total, self.class_coverage[self.seen > 0]
        median = (self.quantile_size((total + 1) // 2) + self.quantile_size(total // 2 + 1)) / 2
        values = {
            "coverage": self.hits.sum() / total,
            "mean_size": (np.arange(len(self.sizes)) * self.sizes).sum() / total,
            "median_size": median,
            "singletons": self.sizes[1] / total,
            "empty": self.sizes[0] / total,
            "macro_coverage": present.mean(),
            "worst_class_coverage": present.min(),
        }
        return {name: float(value) for name, value in values.items()}
