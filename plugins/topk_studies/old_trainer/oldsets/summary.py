"""Coverage and sizes of evaluated sets: over samples, sizes, classes and groups of classes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from topk_studies.old_trainer.oldsets.coverage import binomial_interval
from topk_studies.old_trainer.oldsets.scores import Array, as_numpy
from topk_studies.old_trainer.oldsets.thresholds import fewest

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


@dataclass(frozen=True)
class GroupCoverage:
    """A group of samples with a threshold of its own, and what its sets cover.

    Args:
        name: of the group.
        samples: that calibrated it.
        missing: how many more a finite threshold takes; the group's sets hold all classes where it is not 0.
        hits: of the evaluated samples, those whose label is in the set.
        seen: the evaluated samples.
        mean_size: of their sets; NaN where there are none.
    """

    name: str
    samples: int
    missing: int
    hits: int
    seen: int
    mean_size: float

    @property
    def coverage(self) -> float:
        """NaN where there are no samples."""
        return self.hits / self.seen if self.seen else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """The exact 95 % interval of the coverage."""
        return binomial_interval(self.hits, self.seen) if self.seen else (0.0, 1.0)

    @property
    def told(self) -> str:
        """Coverage and its interval, in words."""
        if not self.seen:
            return f"{self.name}: no images to measure the coverage on"
        low, high = self.interval
        return f"{self.name}: coverage {self.coverage:.4f} ({low:.4f} to {high:.4f}) on {self.seen} images"

    @property
    def lack(self) -> str:
        """What its sets are for want of samples, in words; empty where nothing is missing."""
        if not self.missing:
            return ""
        return (
            f"group {self.name} has {self.samples} calibration samples, {self.missing} fewer than a threshold takes, "
            "so its sets hold all classes"
        )


def group_coverage(
    names: Sequence[str],
    calibrated: np.ndarray,
    evaluated: np.ndarray,
    sizes: np.ndarray,
    hits: np.ndarray,
    alpha: float,
) -> tuple[GroupCoverage, ...]:
    """The coverage of each group.

    Args:
        names: of the groups.
        calibrated: the number of the group of each calibration sample.
        evaluated: the same of each evaluated sample [N].
        sizes: of the evaluated samples' sets [N].
        hits: which of them hold the label, bool [N].
        alpha: the share of labels that may be missed.
    """
    counts, rows = np.bincount(calibrated, minlength=len(names)), []
    for g, name in enumerate(names):
        mine, samples = evaluated == g, int(counts[g])
        size = float(sizes[mine].mean()) if mine.any() else math.nan
        missing = max(0, fewest(alpha) - samples)
        rows.append(GroupCoverage(name, samples, missing, int(hits[mine].sum()), int(mine.sum()), size))
    return tuple(rows)


def _share(hits: int, seen: int) -> dict[str, Any]:
    return {"coverage": hits / seen, "interval": binomial_interval(hits, seen)}
