"""Prediction sets in an evaluation: half of its samples calibrates, the other half is measured."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from topk_registry.train.errors import TrainError
from topk_studies.old_trainer.folders.groups import numbered
from topk_studies.old_trainer.oldsets import (
    LabelCounts,
    PredictionSets,
    Tree,
    binomial_interval,
    create_score,
    false_negative_control,
    inputs_of,
    per_group,
    tune,
)
from topk_studies.old_trainer.oldsets.rules import check_size, find_thresholds
from topk_studies.old_trainer.oldsets.scores import score_kind
from topk_studies.old_trainer.oldsets.sets import ScoredRows
from topk_studies.old_trainer.oldsets.summary import GroupCoverage, group_coverage
from topk_studies.old_trainer.oldsets.tuning import is_tuned
from topk_studies.old_trainer.set_coverage import SetCoverage

SIZES = ("mean_size", "median_size", "mean_nodes")
RISK_CONTROL = "risk-control"  # what --sets names for several labels an image
OF_SETS = ("false_negative_rate", "mean_size", "median_size", "empty", "macro_recall", "worst_class_recall")


def logits_of(probabilities: Tensor) -> Tensor:
    """Logits that have these probabilities: their logarithms."""
    return probabilities.clamp(min=1e-30).log()


class SetEvaluation:
    """Prediction sets on the probabilities of an evaluation.

    A random half calibrates, the rest is measured. Scores whose options are chosen by data, where none is given, take a
    fifth of the half that calibrates to tune.

    Args:
        score: a name of :data:`topk_studies.old_trainer.oldsets.SCORES`.
        alpha: the share of labels that may be missed.
        options: of the score.
        seed: of the split.
        class_counts: training samples of each class, for coverage by frequency.
        groups: of each sample of the evaluation, in order, for a threshold by group.
    """

    def __init__(
        self,
        score: str,
        alpha: float,
        options: dict[str, object],
        *,
        seed: int,
        class_counts: Sequence[int] | None = None,
        groups: Sequence[str] | None = None,
    ) -> None:
        try:
            if score_kind(score).learned and not options:
                raise ValueError(f"score {score} learns its options from labels, and an evaluation has none to spare")
            self.score = create_score(score, **options)
            check_size(2**62, alpha)
        except (TypeError, ValueError) as error:
            raise TrainError(f"--sets: {error}") from error
        self.alpha, self.seed, self.class_counts, self.groups = alpha, seed, class_counts, groups
        self.by_size: list[dict[str, Any]] = []
        self.by_group: tuple[GroupCoverage, ...] = ()
        self.tunes = is_tuned(self.score.name, options)
        self._kept: list[tuple[Tensor, Tensor]] = []

    def update(self, probabilities: Tensor, target: Tensor) -> None:
        """Keep a batch."""
        self._kept.append((probabilities.float().cpu(), target.cpu()))

    def results(self) -> dict[str, float]:
        """Coverage and sizes by name, coverages in percent."""
        p = torch.cat([p for p, _ in self._kept])
        labels = torch.cat([target for _, target in self._kept])
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(self.seed))
        measured, rest = order[: len(order) // 2], order[len(order) // 2 :]
        tuned = len(rest) // 5 if self.tunes else 0
        try:
            names, numbers = numbered(self.groups, len(labels))
            check_size(len(rest) - tuned, self.alpha)
            values = inputs_of(self.score, logits_of(p))  # log-odds take logits
            score = tune(self.score, values[rest[:tuned]], labels[rest[:tuned]], self.alpha) if tuned else self.score
            own = rest[tuned:]
            rows = ScoredRows(score, values[own], labels[own].numpy())
            if numbers is None:
                limits = find_thresholds(rows, self.alpha, "marginal")
            else:
                limits = per_group(rows.label_scores(), numbers[own], names, self.alpha)
        except ValueError as error:
            raise TrainError(f"--sets: {error}") from error
        metric = SetCoverage(p.shape[1], class_counts=self.class_counts)
        groups = None if numbers is None else numbers[measured]
        inside = PredictionSets(score, limits).of_inputs(values[measured], groups=groups)
        metric.update(inside, labels[measured])
        figures = metric.compute(sync=False)
        if isinstance(score, Tree):
            figures["mean_nodes"] = float((score.nodes_of(values[measured], inside) >= 0).sum(-1).mean())
        self.by_size = metric.counts(sync=False).by_size()
        if numbers is not None and groups is not None:
            hits = inside.gather(1, labels[measured, None])[:, 0].numpy()
            self.by_group = group_coverage(names, numbers[own], groups, inside.sum(1).numpy(), hits, self.alpha)
        low, high = binomial_interval(round(figures["coverage"] * len(measured)), len(measured))
        figures |= {"coverage_low": low, "coverage_high": high}
        options = {name: float(value) for name, value in score.numbers().items()}
        percent = {name: value if name in SIZES else 100 * value for name, value in figures.items()}
        return {f"set_{name}": value for name, value in {**percent, **options}.items()}

    def tables(self) -> dict[str, list[dict[str, Any]]]:
        """Coverage by size of the sets and by group, with exact 95 % intervals, of the last results; in percent."""
        sizes = [{**row, **_percent(row["coverage"], row["interval"])} for row in self.by_size]
        groups = [
            {
                "group": row.name,
                "calibration_samples": row.samples,
                "missing": row.missing,
                "samples": row.seen,
                **(_percent(row.coverage, row.interval) if row.seen else {}),
                **({"mean_size": round(row.mean_size, 4)} if row.seen else {}),
            }
            for row in self.by_group
        ]
        return {"set_by_size": sizes, **({"set_by_group": groups} if groups else {})}


def _percent(coverage: float, interval: tuple[float, float]) -> dict[str, Any]:
    return {"coverage": round(100 * coverage, 4), "interval": [round(100 * bound, 4) for bound in interval]}


class LabelSetEvaluation:
    """Sets of several labels on the probabilities of an evaluation, by conformal risk control.

    A random half calibrates, the rest is measured.

    Args:
        rule: ``"risk-control"``, the one there is.
        alpha: the share of an image's labels that may be missed, on average.
        seed: of the split.
    """

    def __init__(self, rule: str, alpha: float, *, seed: int) -> None:
        if rule != RISK_CONTROL:
            raise TrainError(f"--sets: with --task multilabel there are sets by {RISK_CONTROL}, got {rule!r}")
        try:
            check_size(2**62, alpha)
        except ValueError as error:
            raise TrainError(f"--sets: {error}") from error
        self.alpha, self.seed = alpha, seed
        self._kept: list[tuple[Tensor, Tensor]] = []

    def update(self, probabilities: Tensor, target: Tensor) -> None:
        """Keep a batch."""
        self._kept.append((probabilities.float().cpu(), (target >= 0.5).cpu()))

    def results(self) -> dict[str, float]:
        """The false negative rate of sets and its interval, and their sizes, rates in percent."""
        p = torch.cat([p for p, _ in self._kept])
        labels = torch.cat([target for _, target in self._kept])
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(self.seed))
        measured, rest = order[: len(order) // 2], order[len(order) // 2 :]
        try:
            check_size(len(rest), self.alpha)
            sets = false_negative_control(p[rest], labels[rest], self.alpha)
        except ValueError as error:
            raise TrainError(f"--sets: {error}") from error
        counts = LabelCounts.of(sets(p[measured]), labels[measured])
        summary = counts.summary()
        figures = {name: summary[name] for name in OF_SETS}
        figures["false_negative_rate_low"], figures["false_negative_rate_high"] = counts.interval
        return {f"set_{name}": value if name in SIZES else 100 * value for name, value in figures.items()}
