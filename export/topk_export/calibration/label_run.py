"""Calibrate an exported file of several labels: a threshold for each class, and sets of which few labels are missed.

The thresholds of classes are those of the largest F1 on the calibration samples, and promise nothing. The set is that
of conformal risk control: over calibrations and images, the mean share of an image's labels that it misses is at most
alpha.
"""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from topk_export.calibration.facts import REFERENCE
from topk_export.calibration.graph import LABELS, SET, set_model, without_sets
from topk_export.calibration.heads import Heads
from topk_export.calibration.label_graph import PROBABILITIES, add_labels
from topk_export.calibration.plan import Plan, split
from topk_export.calibration.run import Progress, check_written, quiet, run_all
from topk_export.errors import ModelFileError
from topk_export.runtime.metadata import LABEL_SEMANTICS, Metadata
from topk_export.runtime.predictor import Predictor
from topk_export.runtime.ranking import check_outputs
from topk_export.runtime.weights import move_into_place
from topk_export.samples import Samples
from topk_export.verification import storage
from topk_export.verification.graph import head_model, set_metadata
from topk_registry.folders.errors import WrongLabelsError
from topk_registry.oldsets import ClassThresholds, LabelCounts, LabelSets, best_f1, false_negative_control
from topk_registry.oldsets.rules import check_size

RULE = "risk_control"
RISK = "false_negative_rate"
ERRORS = 2  # standard errors above the half that areas under the curve have by chance


@dataclass(frozen=True)
class CalibratedLabels:
    """The result of a calibration: the sets, the thresholds of classes, and what both do on the report's samples."""

    sets: LabelSets
    thresholds: ClassThresholds
    facts: dict[str, Any]
    counts: LabelCounts  # of the sets
    chosen: LabelCounts  # of the classes that reach their own thresholds
    precision: np.ndarray  # average precision of each class [n]
    class_names: tuple[str, ...]


def calibrate_label_file(
    model: str | Path,
    output: str | Path,
    samples: Samples,
    *,
    alpha: float = 0.1,
    report: float = 0.5,
    seed: int = 0,
    device: str = "auto",
    require_gpu: bool = False,
    threads: int | None = None,
    batch_size: int = 32,
    progress: Progress = quiet,
    force: bool = False,
) -> CalibratedLabels:
    """Calibrate an exported file of several labels on held-out samples, and write the result as a new file.

    The file appears whole or not at all. It was run before it appeared: its labels and sets are those of the report.

    Args:
        model: as :func:`topk_export.export_onnx` writes it for the task ``"multilabel"``.
        output: another file.
        samples: held-out images, from neither training nor model selection, with targets of 0 and 1 [N, n].
        alpha: the share of an image's labels that its set may miss, on average.
        report: the share of samples that report.
        seed: of the split.
        device, require_gpu, threads: see :class:`topk_export.Predictor`.
        batch_size: images a run.
        progress: wraps an iterable with a label and a total.
        force: go on where the labels look wrong, by the file's own probabilities.

    Raises:
        WrongLabelsError: the probabilities of labels are no larger than those of other classes.
    """
    output = Path(output)
    if output.exists() and output.samefile(model):
        raise ValueError(f"calibration writes a new file, {output} is the one it reads")
    predictor = Predictor(model, device=device, require_gpu=require_gpu, threads=threads)
    metadata = predictor.metadata
    targets = _check(predictor, samples, str(model))
    parts = split(len(targets), Plan(alpha=alpha, report=report, seed=seed))
    check_size(len(parts["calibrate"]), alpha)
    proto = storage.load(model)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.stem}-") as folder:
        staged = Path(folder) / output.name
        logits, fingerprint = run_all(predictor, samples, targets, batch_size, progress, Path(folder))
        runner = Heads(proto, logits, device)
        every = np.arange(len(targets))
        probabilities = _outputs(runner, head_model(without_sets(proto)), every, [PROBABILITIES])[0]
        area = _check_agreement(probabilities, targets, force=force)
        rows = parts["calibrate"]
        sets = false_negative_control(probabilities[rows], targets[rows], alpha)
        thresholds = best_f1(probabilities[rows], targets[rows])
        built = add_labels(proto, thresholds.values, sets.threshold)
        chosen, inside = _outputs(runner, set_model(built), parts["report"], [LABELS, SET])
        truth = targets[parts["report"]]
        calibrated = CalibratedLabels(
            sets,
            thresholds,
            _facts(sets, parts, samples, fingerprint, seed) | {"area_under_curve": round(area, 6)},
            LabelCounts.of(inside, truth),
            LabelCounts.of(chosen, truth),
            _average_precision(probabilities[parts["report"]], truth),
            metadata.class_names,
        )
        calibrated.facts.update(_reported(calibrated))
        best = probabilities[parts["report"]].max(-1)
        _stamp(built, metadata, calibrated, _reference(best, inside.sum(-1), seed))
        import onnx

        storage.save(built, staged, source=Path(model).parent)
        onnx.checker.check_model(str(staged), full_check=True)
        check_written(staged, samples, parts["report"][:batch_size], runner, built, (LABELS, SET))
        move_into_place(staged, output)
        del logits, runner  # so that every system lets the folder go
    return calibrated


def _check(predictor: Predictor, samples: Samples, model: str) -> np.ndarray:
    """Return the targets as bool [N, n]; raise where the file or the samples are not of several labels."""
    metadata, given = predictor.metadata, np.asarray(samples.labels)
    if not metadata.several:
        raise ModelFileError(
            f"expected a file of several labels, {model} gives one label an image (task {metadata.task}, outputs "
            f"{', '.join(predictor.output_names)}): export the run with --task multilabel, or calibrate with labels"
        )
    check_outputs(predictor.output_names, metadata)
    if given.ndim != 2 or given.shape[1] != metadata.num_classes:
        raise ValueError(
            f"expected targets of 0 and 1 for each of the {metadata.num_classes} classes of {model} [N, "
            f"{metadata.num_classes}], got {given.dtype} {list(given.shape)} from {samples.name}"
        )
    if not ((given == 0) | (given == 1)).all():
        raise ValueError(f"expected targets of 0 and 1, {samples.name} has {given[(given != 0) & (given != 1)][0]:g}")
    return given.astype(bool)


def _outputs(runner: Heads, head: Any, rows: np.ndarray, names: list[str]) -> list[np.ndarray]:
    parts = [outputs for _, outputs in runner.outputs(head, rows, names)]
    return [np.concatenate(part) for part in zip(*parts, strict=True)]


def _check_agreement(probabilities: np.ndarray, targets: np.ndarray, *, force: bool) -> float:
    """Return the area under the ROC curve, mean over classes; raise where it is near that of chance.

    The standard error of one class's area by chance is sqrt((P + Q + 1) / (12 P Q)), P and Q the images with and
    without it. Classes that depend on one another have at most the mean of these for the mean of their areas.
    """
    areas, errors = [], []
    for c in range(targets.shape[1]):
        own, others = probabilities[targets[:, c], c], np.sort(probabilities[~targets[:, c], c])
        p, q = len(own), len(others)
        if p and q:
            below = np.searchsorted(others, own, "left") + np.searchsorted(others, own, "right")
            areas.append(below.mean() / 2 / q)
            errors.append(np.sqrt((p + q + 1) / (12 * p * q)))
    if not areas:
        raise ValueError("no class is the label of some of these images and not of others: nothing can be calibrated")
    area, least = float(np.mean(areas)), 0.5 + ERRORS * float(np.mean(errors))
    if area < least and not force:
        raise WrongLabelsError(
            f"images with a class have a larger probability of it than images without in {area:.1%} of pairs, where "
            f"chance has 50% and {least:.1%} is expected. Are these the model's classes and its images? --force goes "
            "on all the same"
        )
    return area


def _average_precision(probabilities: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The average precision of each class [n]; NaN for a class that no sample has."""
    import torch

    from topk_registry.metrics import average_precision

    return average_precision(torch.from_numpy(probabilities), torch.from_numpy(targets)).numpy()


def _facts(
    sets: LabelSets, parts: Mapping[str, np.ndarray], samples: Samples, fingerprint: str, seed: int
) -> dict[str, Any]:
    """Return the entries on sets in the file's metadata."""
    return {
        "rule": RULE,
        "risk": RISK,
        "alpha": sets.alpha,
        "guarantee": sets.promise,
        # JSON knows no infinity: where empty sets miss too little there is no threshold to tell
        "threshold": sets.threshold if np.isfinite(sets.threshold) else None,
        "samples": sets.samples,
        "samples_without_labels": sets.without_labels,
        "report_samples": len(parts["report"]),
        "data": samples.name,
        "classes": samples.told,
        "fingerprint": fingerprint,
        "seed": seed,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _reported(calibrated: CalibratedLabels) -> dict[str, float]:
    of_labels = {f"labels_{name}": value for name, value in calibrated.chosen.summary().items() if name.endswith("f1")}
    values = {**calibrated.counts.summary(), **of_labels, "map": mean_average_precision(calibrated)}
    return {f"report_{name}": round(value, 6) for name, value in values.items() if np.isfinite(value)}


def mean_average_precision(found: CalibratedLabels) -> float:
    """The mean of the average precision over the classes that the report's samples have."""
    present = found.precision[~np.isnan(found.precision)]
    return float(present.mean()) if len(present) else float("nan")


def _reference(best: np.ndarray, sizes: np.ndarray, seed: int) -> dict[str, list[float]]:
    """Return the reference of monitoring: sizes of sets, and probabilities of the best class."""
    rows = np.random.default_rng([seed, 1]).permutation(len(best))[:REFERENCE]
    return {"probability": [float(f"{p:.6g}") for p in best[rows]], "size": sizes[rows].tolist()}


def _stamp(built: Any, metadata: Metadata, calibrated: CalibratedLabels, reference: Mapping[str, Any]) -> None:
    known = {prop.key: prop.value for prop in built.metadata_props}
    chosen = calibrated.thresholds
    labels = {
        "thresholds": chosen.values.tolist(),
        "chosen_by": "f1",
        "f1": [None if np.isnan(value) else round(value, 6) for value in chosen.f1.tolist()],
        "positives": chosen.positives.tolist(),
        "without_labels": chosen.fallen_back.tolist(),
    }
    outputs = {**metadata.outputs, **LABEL_SEMANTICS}
    stamped = replace(metadata, sets=dict(calibrated.facts), labels=labels, outputs=outputs)
    set_metadata(built, {**known, **stamped.to_props(), "sets_reference": json.dumps(reference)})
