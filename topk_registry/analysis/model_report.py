"""A report on one classifier: classes, confusions, reliability, risk, and the images that it gets most wrong."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

import numpy as np

from topk_registry.analysis.calibration import BINS, Reliability, brier_score, reliability
from topk_registry.analysis.confusion import Pair, confused_pairs, look_alikes, suggested_k
from topk_registry.analysis.measures import (
    Floats,
    Integers,
    blocks,
    check_scores,
    label_log_likelihoods,
    log_softmax,
    top_classes,
    topk_credits,
)
from topk_registry.analysis.risk import RiskCurve, risk_coverage

FINE = 10_000  # bins of a first pass over marginals, from which bins of equal mass are made


@dataclass(frozen=True)
class ClassRow:
    """Measures of a class; None where nothing counts for it.

    Args:
        name: of the class.
        support: its images.
        precision: share of the images with this best class that have this label.
        recall: share of its images with this best class.
        topk_recall: by k, share of its images with it among the k best.
        brier: mean over all images of the squared difference of its probability from 1 for its images, else 0.
    """

    name: str
    support: int
    precision: float | None
    recall: float | None
    topk_recall: dict[int, float | None]
    brier: float


@dataclass(frozen=True)
class Marginals:
    """Reliability of top-k marginals, the label taken as one of the k answers.

    Args:
        k: of the sets.
        predicted, observed: means of each bin; bins hold equal sums of marginals.
        calibration_error: as of :class:`topk_registry.metrics.MarginalCalibration`.
    """

    k: int
    predicted: list[float]
    observed: list[float]
    calibration_error: float


@dataclass(frozen=True)
class Report:
    """All findings on a classifier.

    Args:
        name: of the model.
        images: how many there are.
        class_names: of the classes.
        summary: measures over all images by name.
        classes: a row a class.
        pairs: of classes that are taken for each other, those with the most images first.
        groups: of look-alikes, numbers of classes.
        suggested_k: the set size that holds the group of most images in groups; None without groups.
        reliability: of the probability that the label is among the k largest scores, by k.
        marginals: their reliability, by k.
        risk: against coverage, by k.
        worst: images whose labels have the lowest probability.
    """

    name: str
    images: int
    class_names: tuple[str, ...]
    summary: dict[str, float]
    classes: list[ClassRow]
    pairs: list[Pair]
    groups: list[list[int]]
    suggested_k: int | None
    reliability: dict[int, Reliability]
    marginals: dict[int, Marginals]
    risk: dict[int, RiskCurve]
    worst: Integers
    labels: Integers = field(repr=False)
    predicted: Integers = field(repr=False)
    likelihoods: Floats = field(repr=False)
    confidence: Floats = field(repr=False)

    def superclasses(self) -> dict[str, str]:
        """The group of each class by name, as ``timm train --superclasses`` takes them; others stand for themselves."""
        names = self.class_names
        group_of = {name: name for name in names}
        for number, group in enumerate(self.groups, 1):
            group_of |= {names[c]: f"look-alikes {number}: {names[group[0]]}" for c in group}
        return group_of

    def to_dict(self) -> dict[str, Any]:
        """The findings as plain types, for JSON."""
        names = self.class_names
        return {
            "model": self.name,
            "images": self.images,
            "summary": self.summary,
            "classes": [asdict(row) for row in self.classes],
            "pairs": [{**asdict(p), "a": names[p.a], "b": names[p.b]} for p in self.pairs],
            "groups": [[names[c] for c in group] for group in self.groups],
            "suggested_k": self.suggested_k,
            "reliability": {
                str(k): {name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in vars(diagram).items()}
                for k, diagram in self.reliability.items()
            },
            "marginals": {str(k): asdict(marginals) for k, marginals in self.marginals.items()},
            "risk": {
                str(k): {
                    "area": curve.area,
                    "least": curve.least,
                    "coverage_at_risk": {f"{risk:g}": curve.at_risk(risk) for risk in (0.01, 0.02, 0.05, 0.1, 0.2)},
                }
                for k, curve in self.risk.items()
            },
            "worst": [
                {
                    "image": int(i),
                    "label": names[self.labels[i]],
                    "predicted": names[self.predicted[i]],
                    "log_likelihood": float(self.likelihoods[i]),
                }
                for i in self.worst
            ],
        }


def report(
    logits: Any,
    labels: Any,
    *,
    name: str = "model",
    class_names: Sequence[str] | None = None,
    k: Sequence[int] = (1, 5),
    bins: int = BINS,
    temperature: float = 1.0,
    worst: int = 48,
) -> Report:
    """Report on a classifier from its scores and the labels of the same images.

    Args:
        logits: scores [N, n]; their softmax is the model's probabilities.
        labels: of the images [N].
        name: of the model.
        class_names: of the classes; by default their numbers.
        k: set sizes; those of n or more are left out.
        bins: of reliability.
        temperature: of the top-k marginals.
        worst: how many of the worst images are listed.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> labels = rng.integers(0, 10, 400)
        >>> found = report(3 * np.eye(10)[labels] + rng.normal(size=(400, 10)), labels, k=(1, 3))
        >>> sorted(found.summary)[:3]
        ['area_under_risk', 'brier', 'calibration_error']
    """
    scores, given = check_scores(logits, labels)
    count, n = scores.shape
    names = tuple(class_names or map(str, range(n)))
    if len(names) != n:
        raise ValueError(f"expected {n} names of classes, got {len(names)}")
    sizes = sorted({1, *(size for size in k if size < n)})
    likelihoods = label_log_likelihoods(scores, given)
    best, hits = top_classes(scores), {size: topk_credits(scores, given, size) for size in sizes}
    masses, brier, by_class = _probabilities(scores, given, sizes)
    diagrams = {size: reliability(masses[size], hits[size], bins=bins) for size in sizes}
    risks = {size: risk_coverage(masses[size], 1 - hits[size]) for size in sizes}
    groups = look_alikes(scores, given)
    rows = _class_rows(best, given, hits, by_class, names)
    summary: dict[str, float] = {}
    for size in sizes:
        recalls = [recall for row in rows if (recall := row.topk_recall[size]) is not None]
        summary |= {f"top{size}": float(hits[size].mean()), f"macro_top{size}": fmean(recalls)}
    summary |= {
        "log_likelihood": float(likelihoods.mean()),
        "brier": brier,
        "calibration_error": diagrams[1].calibration_error,
        "smooth_calibration_error": diagrams[1].smooth_calibration_error,
        "area_under_risk": risks[1].area,
    }
    return Report(
        name=name,
        images=count,
        class_names=names,
        summary=summary,
        classes=rows,
        pairs=confused_pairs(scores, given),
        groups=groups,
        suggested_k=suggested_k(groups, given),
        reliability=diagrams,
        marginals={size: _marginals(scores, given, size, temperature, bins) for size in sizes},
        risk=risks,
        worst=np.argsort(likelihoods, kind="stable")[:worst],
        labels=given,
        predicted=best,
        likelihoods=likelihoods,
        confidence=masses[1],
    )


def _probabilities(
    scores: np.ndarray, labels: Integers, sizes: Sequence[int]
) -> tuple[dict[int, Floats], float, Floats]:
    """The softmax mass of the k best classes of each image by k, the Brier score, and that of each class [n]."""
    masses: dict[int, list[Floats]] = {size: [] for size in sizes}
    total, by_class = 0.0, np.zeros(scores.shape[1])
    for rows in blocks(len(labels)):
        p, given = np.exp(log_softmax(scores[rows])), labels[rows]
        best = -np.partition(-p, max(sizes) - 1, axis=1)[:, : max(sizes)]
        best = -np.sort(-best, axis=1)
        for size in sizes:
            masses[size].append(best[:, :size].sum(1).clip(max=1.0))
        total += brier_score(p, given) * len(given)
        by_class += np.square(p).sum(0)
        own = p[np.arange(len(given)), given]
        by_class += np.bincount(given, 1 - 2 * own, minlength=scores.shape[1])
    count = len(labels)
    return {size: np.concatenate(parts) for size, parts in masses.items()}, total / count, by_class / count


def _class_rows(
    best: Integers, labels: Integers, hits: dict[int, Floats], brier: Floats, names: Sequence[str]
) -> list[ClassRow]:
    n = len(names)
    seen, taken = np.bincount(labels, minlength=n), np.bincount(best, minlength=n)
    right = np.bincount(labels[best == labels], minlength=n)
    credit = {size: np.bincount(labels, values, minlength=n) for size, values in hits.items()}
    return [
        ClassRow(
            names[c],
            int(seen[c]),
            _ratio(right[c], taken[c]),
            _ratio(right[c], seen[c]),
            {size: _ratio(values[c], seen[c]) for size, values in credit.items()},
            float(brier[c]),
        )
        for c in range(n)
    ]


def _ratio(part: Any, whole: Any) -> float | None:
    return float(part / whole) if whole else None


def _marginals(scores: np.ndarray, labels: Integers, k: int, temperature: float, bins: int) -> Marginals:
    """Reliability of marginals by the metric of training, in bins that hold equal sums of marginals."""
    import torch

    from topk_registry.metrics import MarginalCalibration
    from topk_registry.ops.ksubset import topk_marginals

    def batches() -> Any:
        for rows in blocks(len(labels)):
            block = torch.from_numpy(np.ascontiguousarray(scores[rows], np.float64))
            yield topk_marginals(block, k, temperature=temperature), torch.from_numpy(labels[rows])

    mass = np.zeros(FINE)
    for values, _ in batches():
        flat = values.numpy().ravel()
        mass += np.bincount(np.minimum((flat * FINE).astype(int), FINE - 1), flat, minlength=FINE)
    reached = np.cumsum(mass) / mass.sum()
    edges = np.unique(np.searchsorted(reached, np.arange(1, bins) / bins) + 1) / FINE
    metric = MarginalCalibration(k, bins=[0.0, *(float(e) for e in edges if 0 < e < 1), 1.0])
    for values, target in batches():
        metric.update(values, target)
    diagram = metric.reliability(sync=False)
    full = [i for i, entries in enumerate(diagram["entries"]) if entries]
    error = metric.compute(sync=False)["calibration_error"]
    return Marginals(k, [diagram["predicted"][i] for i in full], [diagram["observed"][i] for i in full], error)
