"""Coverage and sizes of evaluated sets: over samples, sizes, classes and groups of classes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from topk_registry.conformal.coverage import binomial_interval
from topk_registry.conformal.scores import Array, as_numpy

SIZE_BINS = ((0, 0), (1, 1), (2, 3), (4, 10), (11, 100), (101, math.inf))  # Angelopoulos et al. 2021 cut so


@dataclass(frozen=True)
class SetCounts:
    """Sums over evaluated samples, from which everything else follows.

    Args:
        hits, seen: of each class as the label [n].
        size_hits, size_seen: of each size of a set [n + 1].
    """

    hits: np.ndarray
    seen: np.ndarray
    size_hits: np.ndarray
    size_seen: np.ndarray

    @classmethod
    def of(cls, sets: Array, labels: Array) -> "SetCounts":
        """The sums of sets bool [B, n] and labels [B]."""
        inside, labels = as_numpy(sets), as_numpy(labels)
        n = inside.shape[-1]
        hit, size = inside[np.arange(len(labels)), labels], inside.sum(-1)
        return cls(
            np.bincount(labels[hit], minlength=n),
            np.bincount(labels, minlength=n),
            np.bincount(size[hit], minlength=n + 1),
            np.bincount(size, minlength=n + 1),
        )

    def __add__(self, other: "SetCounts") -> "SetCounts":
        return SetCounts(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    @property
    def total(self) -> int:
        return int(self.seen.sum())

    @property
    def by_class(self) -> np.ndarray:
        """The coverage of each class [n]; NaN for those without samples."""
        with np.errstate(invalid="ignore"):
            return self.hits / self.seen

    def summary(self, groups: Mapping[str, np.ndarray] | None = None) -> dict[str, float]:
        """Coverage and sizes by name; NaN where there is nothing to divide by.

        ``coverage``, ``mean_size``, ``median_size``, ``singletons`` (share of sets of one class), ``empty``,
        ``macro_coverage`` (mean over classes), ``worst_class_coverage``, ``worst_size_coverage`` (over ranges of sizes
        with at least 1 % of the samples), and ``GROUP_coverage`` of each group, the mean over its classes.

        Args:
            groups: which classes are in each, bool [n].
        """
        if not self.total:
            return {}
        sizes = np.arange(len(self.size_seen))
        present = self.seen > 0
        strata = [row["coverage"] for row in self.by_size() if 100 * row["samples"] >= self.total]
        values = {
            "coverage": self.hits.sum() / self.total,
            "mean_size": (sizes * self.size_seen).sum() / self.total,
            "median_size": float(np.searchsorted(np.cumsum(self.size_seen), self.total / 2)),
            "singletons": self.size_seen[1] / self.total,
            "empty": self.size_seen[0] / self.total,
            "macro_coverage": self.by_class[present].mean(),
            "worst_class_coverage": self.by_class[present].min(),
            "worst_size_coverage": min(strata),
        }
        for name, members in (groups or {}).items():
            mine = members & present
            values[f"{name}_coverage"] = self.by_class[mine].mean() if mine.any() else math.nan
        return {name: float(value) for name, value in values.items()}

    def by_size(self) -> list[dict[str, Any]]:
        """Coverage by ranges of set sizes, with its exact 95 % interval."""
        rows = []
        for low, high in SIZE_BINS:
            part = slice(low, None if high == math.inf else int(high) + 1)
            seen, hits = int(self.size_seen[part].sum()), int(self.size_hits[part].sum())
            if seen:
                label = str(low) if low == high else f"{low} or more" if high == math.inf else f"{low} to {high}"
                rows.append({"size": label, "samples": seen, **_share(hits, seen)})
        return rows


def _share(hits: int, seen: int) -> dict[str, Any]:
    return {"coverage": hits / seen, "interval": binomial_interval(hits, seen)}
