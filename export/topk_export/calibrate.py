"""Calibrate an exported file on labeled images: thresholds of prediction sets, a new file, and a report.

The images are split at random. The first part determines the thresholds of the prediction sets. The coverage in the
report is measured on the second part.
"""

import functools
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from topk_export import graph
from topk_export.errors import ExportError, ModelFileError
from topk_export.nodes import LARGEST, SCORES, SET, add_sets, digest_of_table, score_model
from topk_export.runtime.metadata import LOGITS, SET_OUTPUTS, Metadata
from topk_export.runtime.predictor import Predictor, read_ahead
from topk_export.runtime.preprocess import SUFFIXES
from topk_export.runtime.session import open_session
from topk_export.runtime.weights import move_into_place
from topk_export.verify import expected_sets
from topk_registry.conformal import PredictionSets, Score, SetCounts, fewest, guarantee, threshold_table
from topk_registry.conformal.sets import all_levels, check_size
from topk_registry.conformal.thresholds import check_labels
from topk_registry.data.agreement import agreement, pairs
from topk_registry.data.folders import FolderError, class_map, read_folders, split_folder

SPLIT = "calibration"
BATCH = 4096  # rows of logits per run of the score nodes
LISTS = {
    "marginal": "with a class list, the guarantee holds on average over all classes, not over the classes in the list",
    "per-class": "with a class list, the guarantee holds for every class in the list",
}
Progress = Callable[[Iterable[Any], int], Iterable[Any]]


@dataclass(frozen=True)
class Images:
    """Labeled images.

    Args:
        name: name of the data, without its location.
        images: sequence of paths or images. Indexing may load an image.
        labels: class indices [N].
    """

    name: str
    images: Any
    labels: np.ndarray


@dataclass(frozen=True)
class Calibration:
    """Result of a calibration.

    Args:
        sets: the calibrated sets.
        facts: the entry ``sets`` of the file's metadata.
        counts: coverage and set sizes on the images of the report.
        calibration_counts: number of calibration images of each class [n].
        class_names: class names of the file.
        earlier: coverage and set sizes of the input file on all images, or None if the input file had no sets.
        confused: pairs (label, predicted class) of folders whose images are mostly predicted as one other class.
    """

    sets: PredictionSets
    facts: dict[str, Any]
    counts: SetCounts
    calibration_counts: np.ndarray
    class_names: tuple[str, ...]
    earlier: SetCounts | None = None
    confused: Sequence[tuple[str, str]] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the facts and the coverage per class as JSON values."""
        classes = [
            {
                "name": name,
                "calibration_images": int(self.calibration_counts[i]),
                "report_images": int(self.counts.seen[i]),
                "covered": int(self.counts.hits[i]),
            }
            for i, name in enumerate(self.class_names)
        ]
        earlier = None if self.earlier is None else self.earlier.summary()
        report = {"summary": self.counts.summary(), "earlier": earlier, "confused": list(self.confused)}
        return {**self.facts, **report, "classes": classes}

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        facts, summary = self.facts, self.counts.summary()
        low, high = facts["coverage_interval"]
        options = ", ".join(f"{key} {value:g}" for key, value in facts["options"].items())
        out = [
            f"top-1       {facts['top1']:.1%} of {facts['samples'] + facts['report_samples']} images",
            f"score       {facts['score']}" + (f" ({options})" if options else "") + f", {facts['rule']} thresholds",
            f"guarantee   {facts['guarantee']}",
            f"class lists {facts['guarantee_lists']}",
            f"coverage    {facts['coverage']:.4f} (95 % interval {low:.4f} to {high:.4f}) on "
            f"{facts['report_samples']} other images",
            f"set size    mean {summary['mean_size']:.2f}, median {summary['median_size']:g}, of "
            f"{len(self.class_names)} classes",
        ]
        if self.earlier is not None:
            low, high = self.earlier.interval
            out.append(
                f"before      the input file's own sets cover {self.earlier.summary()['coverage']:.4f} (95 % interval "
                f"{low:.4f} to {high:.4f}) of all {self.earlier.total} images"
            )
        if facts["classes_in_every_set"]:
            out.append(
                f"note        {facts['classes_in_every_set']} classes have fewer than {fewest(facts['alpha'])} "
                "calibration images: they are in every set"
            )
        if self.confused:
            out.append(
                f"note        images of these folders are mostly predicted as another class: {pairs(self.confused)}"
            )
        if high < 1 - facts["alpha"]:
            out.append("warning     the measured coverage is below the guarantee: are these the images of one source?")
        if facts["forced"]:
            out.append(f"FORCED      {facts['forced']}")
        return out


def open_folder(
    folder: str | Path, class_names: Sequence[str], *, split: str | None = None, ignore_unknown: bool = False
) -> tuple[Images, str]:
    """Return the images of ``FOLDER/CLASS/...`` with labels, and a description of the mapping to classes.

    Args:
        folder: folder with one subfolder per class, or with one subfolder per split that contains one subfolder per
            class.
        class_names: class names of the file.
        split: name of the subfolder of a split. Default: ``calibration``, or the folder itself if it has no splits.
        ignore_unknown: skip folders whose name is not a class.

    Raises:
        FolderError: the split does not exist or must be named, or folders cannot be mapped to classes of the file.
    """
    name = Path(os.path.abspath(folder)).name  # without the parent folders, because the file may be shared
    other = split_folder(folder, "train") or split_folder(folder, "validation")
    if chosen := split_folder(folder, split or SPLIT):
        folder = chosen
    elif split or (other and other.name not in class_names):
        raise FolderError(
            f"{folder} has no folder {split or SPLIT!r}: name the folder of images that were used neither for training "
            "nor for the choice of the model (--split NAME)"
        )
    found = read_folders(folder, SUFFIXES)
    numbers, summary = class_map(found.names, class_names, where=folder, of="the file", ignore_unknown=ignore_unknown)
    known = [(path, numbers[name]) for path, name in found.images if name in numbers]
    labels = np.asarray([label for _, label in known], np.int64)
    return Images(name, [path for path, _ in known], labels), "; ".join([f"{folder}: {summary}", *found.notes])


def calibrate_file(
    model: str | Path,
    output: str | Path,
    data: Images,
    *,
    alpha: float = 0.1,
    score: Score | None = None,
    rule: str = "marginal",
    temperature: float = 1.0,
    report_share: float = 0.5,
    seed: int = 0,
    batch_size: int = 32,
    force: bool = False,
    device: str = "auto",
    progress: Progress = lambda items, total: items,
) -> Calibration:
    """Calibrate an exported file and write the result atomically to a new file.

    Args:
        model: file from :func:`topk_export.export_onnx`.
        output: file to write, different from ``model``.
        data: labeled images that were used neither for training nor for model selection.
        alpha: default miscoverage level. The file supports 0.005 to 0.5.
        score: nonconformity score. Default: ``lac``.
        rule: ``"marginal"`` or ``"per-class"``.
        temperature: number by which logits are divided.
        report_share: share of the images on which the coverage is measured. All other images determine the thresholds.
        seed: seed of the split.
        batch_size: number of images per run.
        force: calibrate even if labels look wrong. The file then has no guarantee.
        device: device of the model, as in :class:`topk_export.Predictor`.
        progress: function ``(batches, count)`` that returns an iterator over ``batches``, for example a progress bar.
            ``count`` is the number of batches.

    Raises:
        WrongLabelsError: labels contradict the predictions. The message names the folders.
    """
    output, score = Path(output), score or Score()
    if output.exists() and output.samefile(model):
        raise ValueError(f"the output {output} is the input: choose another file")
    predictor = Predictor(model, device=device)
    metadata = predictor.metadata
    if metadata.multilabel:
        raise ModelFileError(f"{model} is a multilabel file: prediction sets need a file with one label per image")
    n, names = metadata.num_classes, metadata.class_names
    labels = check_labels(data.labels, n)
    order = np.random.default_rng(seed).permutation(len(labels))
    calibrate, report = np.split(order, [len(labels) - round(report_share * len(labels))])
    check_size(len(calibrate), alpha)
    if not len(report):
        raise ValueError("no images are left for the report: use more images or a larger --report-share")
    logits, earlier = _run(predictor, data.images, labels, batch_size, progress)
    agreed = agreement(logits.argmax(-1), labels, names)
    agreed.check(force=force)
    proto = graph.load(model)
    scores = label_scores(proto, score, temperature, logits[calibrate], labels[calibrate])
    levels = all_levels(alpha)
    table = threshold_table(scores, labels[calibrate], n, rule=rule, levels=levels)
    sets = PredictionSets(score, levels, table, alpha, temperature)
    built = add_sets(proto, sets)
    counts = SetCounts.of(_head_sets(built, logits[report]), labels[report])
    facts = {
        **_facts(sets, agreed.problem, calibrate, report, counts),
        "top1": round(agreed.accuracy, 6),
        "data": data.name,
        "seed": seed,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    _write(built, sets, metadata, facts, Path(model), output)
    seen = np.bincount(labels[calibrate], minlength=n)
    return Calibration(sets, facts, counts, seen, names, earlier, agreed.confused)


def label_scores(proto: Any, score: Score, temperature: float, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the score of each label [N]. The nodes of the graph compute the scores."""
    session = open_session(score_model(proto, score, temperature).SerializeToString(), device="cpu")
    parts = []
    for start in range(0, len(labels), BATCH):
        scores = session.run([SCORES], {LOGITS: logits[start : start + BATCH]})[0]
        parts.append(scores[np.arange(len(scores)), labels[start : start + BATCH]])
    values = np.concatenate(parts)
    values[values >= LARGEST] = np.inf
    values[values <= -LARGEST] = -np.inf
    return values


def _run(
    predictor: Predictor, images: Any, labels: np.ndarray, size: int, progress: Progress
) -> tuple[np.ndarray, SetCounts | None]:
    """Return the logits [N, n], and the counts of the prediction sets of the input file, or None if it has no sets."""
    count = len(labels)
    logits = np.empty((count, predictor.metadata.num_classes), np.float32)
    starts, parts = range(0, count, size), []
    batches = read_ahead(lambda i: predictor.input_of(images[i]), range(count), batch=size, workers=predictor.workers)
    for start, batch in zip(progress(starts, len(starts)), batches, strict=True):
        outputs = predictor.run(np.stack(batch))
        logits[start : start + len(batch)] = outputs[LOGITS]
        if SET in outputs:
            parts.append(SetCounts.of(outputs[SET], labels[start : start + len(batch)]))
    if len(bad := np.flatnonzero(~np.isfinite(logits.max(-1)))):
        raise ExportError(f"the logits of {len(bad)} images are not finite; the first is number {bad[0]}")
    return logits, functools.reduce(SetCounts.__add__, parts) if parts else None


def _head_sets(built: Any, logits: np.ndarray) -> np.ndarray:
    session = open_session(graph.head_model(built).SerializeToString(), device="cpu")
    parts = [session.run([SET], {LOGITS: logits[i : i + BATCH]})[0] for i in range(0, len(logits), BATCH)]
    return np.concatenate(parts)


def _facts(
    sets: PredictionSets, problem: str, calibrate: np.ndarray, report: np.ndarray, counts: SetCounts
) -> dict[str, Any]:
    summary, limits = counts.summary(), sets.thresholds()
    forced = f"calibrated with --force although labels look wrong: {problem}" if problem else ""
    return {
        "score": sets.score.name,
        "options": sets.score.options,
        "rule": sets.rule,
        "alpha": sets.alpha,
        "alphas": list(sets.levels),
        "thresholds_sha256": digest_of_table(sets),
        "temperature": sets.temperature,
        "guarantee": "none, because the labels of the calibration looked wrong"
        if forced
        else guarantee(sets.rule, sets.alpha),
        "guarantee_lists": "none" if forced else LISTS[sets.rule],
        "forced": forced,
        "samples": len(calibrate),
        "report_samples": len(report),
        "coverage": round(summary["coverage"], 6),
        "coverage_interval": [round(x, 6) for x in counts.interval],
        "mean_size": round(summary["mean_size"], 6),
        "median_size": summary["median_size"],
        "classes_in_every_set": int(np.isposinf(limits).sum()),
    }


def _write(
    built: Any, sets: PredictionSets, metadata: Metadata, facts: dict[str, Any], model: Path, output: Path
) -> None:
    """Write the calibrated file. Check that the thresholds that are read from the file give the same sets."""
    stamped = replace(metadata, sets=facts, outputs={**metadata.outputs, **SET_OUTPUTS})
    graph.set_metadata(built, {**{entry.key: entry.value for entry in built.metadata_props}, **stamped.to_props()})
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.stem}-") as folder:
        staged = Path(folder) / output.name
        graph.save(built, staged, source=model.parent)
        written = Predictor(staged, device="cpu")
        shape = (2, *written.input_shape)
        batch = np.random.default_rng(0).integers(0, 256, shape).astype(written.input_type)
        outputs = written.run(batch)
        expected, near = expected_sets(outputs[LOGITS], facts, sets.thresholds())
        if ((outputs[SET] != expected) & ~near).any():
            raise ExportError("the sets of the calibrated file do not match its thresholds, so it was not written")
        move_into_place(staged, output)
