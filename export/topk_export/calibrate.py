"""Calibration: extend an exported ONNX file, so that the model also returns a prediction set for each image.

A prediction set contains the true class with probability 1 - alpha or more, for an alpha that the user chooses. The set
contains each class whose nonconformity score is at most a threshold. The score is small if the class fits the image.

The calibration splits the labeled data at random into three parts. The first part fits a temperature for the sets. The
second part determines the thresholds. The third part measures the coverage: the fraction of sets that contain the
label. The calibration writes a new ONNX file that contains the thresholds, and returns a report.

The labeled data are images, arrays for the inputs of the model, or logits that the model computed elsewhere.
"""

import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from topk_export import graph
from topk_export.errors import ExportError, ImageError, ModelFileError
from topk_export.nodes import LARGEST, SCORES, SET, add_sets, digest_of_table, score_model
from topk_export.runtime.inputs import inputs_for
from topk_export.runtime.metadata import LOGITS, SET_OUTPUTS, Metadata
from topk_export.runtime.predictor import Predictor, read_ahead
from topk_export.runtime.preprocess import SUFFIXES
from topk_export.runtime.session import open_session
from topk_export.staging import staged_at
from topk_export.verify import SAMPLE, beside, expected_sets, load_sample
from topk_registry.conformal import (
    PredictionSets,
    Score,
    SetCounts,
    fewest,
    fit_temperature,
    guarantee,
    order_of,
    threshold_table,
)
from topk_registry.conformal.sets import all_levels, check_size
from topk_registry.conformal.thresholds import check_labels
from topk_registry.data.agreement import agreement
from topk_registry.data.folders import IMAGE_SUFFIXES, class_map, listed, read_folders, split_folder
from topk_registry.data.held_out import held_out_indices, images_to_use
from topk_registry.errors import FolderError

SPLIT = "calibration"
FIT_SHARE = 0.2  # fraction of the data that fits the temperature
FEWEST_TO_FIT = 100
MAX_REPEATED = 0.05  # fraction of repeated rows of logits from which on the report says so
MAX_TIED = 0.01  # fraction of calibration scores that equal the threshold, likewise
BATCH = 4096  # number of rows of logits per run of the ONNX nodes that compute scores or sets
LISTS = {
    "marginal": "with a class list, the guarantee holds on average over all classes, not over the classes in the list",
    "per-class": "with a class list, the guarantee holds for every class in the list",
}
Progress = Callable[[Iterable[Any], int], Iterable[Any]]


@dataclass(frozen=True)
class Images:
    """Labeled images for a calibration."""

    name: str  # name of the data set, which the calibrated file records
    images: Any  # sequence of N paths or images; each is read once, so the sequence may load an image on access
    labels: np.ndarray  # class indices [N]


@dataclass(frozen=True)
class Arrays:
    """Labeled inputs for a calibration of a file that takes arrays."""

    name: str
    inputs: Mapping[str, np.ndarray]  # one array per input of the model, each with N rows
    labels: np.ndarray  # class indices [N]


@dataclass(frozen=True)
class KnownLogits:
    """Labeled logits for a calibration, if the model ran elsewhere."""

    name: str
    logits: np.ndarray  # [N, n], in the order of the model's classes
    labels: np.ndarray  # class indices [N]


@dataclass(frozen=True)
class Calibration:
    """Result of :func:`calibrate_file`.

    The calibration split the labeled data into three parts. The first part fitted the temperature. The second part
    determined the thresholds: a prediction set contains each class with a nonconformity score of at most a threshold.
    The third part measured the coverage (the fraction of sets that contain the label) and the sizes of the sets.
    """

    sets: PredictionSets  # the nonconformity score and the thresholds
    facts: dict[str, Any]  # such as alpha and the coverage; also in the metadata of the calibrated file, key ``sets``
    counts: SetCounts  # coverage and set sizes on the third part
    calibration_counts: np.ndarray  # [n], the number of images of each class in the second part
    class_names: tuple[str, ...]
    earlier: SetCounts | None = None  # coverage and set sizes of the input file on all images; None: it has no sets
    confused: Sequence[tuple[str, str]] = ()  # (A, B): for most images with the label A, the model predicts class B

    def as_json(self) -> dict[str, Any]:
        """Return the results of the calibration as a dictionary of JSON values."""
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
        """Return the results of the calibration as lines of text."""
        facts, summary = self.facts, self.counts.summary()
        low, high = facts["coverage_interval"]
        options = ", ".join(f"{key} {value:g}" for key, value in facts["options"].items())
        out = [
            f"top-1       {facts['top1']:.1%} of {facts['all_samples']} images",
            f"temperature {facts['temperature']:.4g}, {facts['temperature_source']}",
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
        out += [f"note        {note}" for note in facts["notes"]]
        if too_low(int(self.counts.hits.sum()), self.counts.total, facts["samples"], facts["alpha"]):
            out.append("warning     the measured coverage is below the guarantee: are these the images of one source?")
        if facts["forced"]:
            out.append(f"FORCED      {facts['forced']}")
        return out


def open_folder(
    folder: str | Path,
    class_names: Sequence[str],
    *,
    split: str | None = None,
    ignore_unknown: bool = False,
    trained_on: Mapping[str, Any] | None = None,
    all_images: bool = True,
) -> tuple[Images, str]:
    """Find labeled images in a folder. The label of an image is the name of the subfolder that contains the image.

    Args:
        folder: folder with one subfolder per class, or folder of a data set with splits such as ``train`` and
            ``calibration``. In the second case, each split is a subfolder, and contains one subfolder per class.
        class_names: class names of the exported file.
        split: name of the split to read. Default: ``calibration``, or ``folder`` itself if there are no splits.
        ignore_unknown: skip subfolders with a name that is not a class name. By default, such a subfolder raises an
            exception.
        trained_on: record of the training run, from the metadata of the exported file.
        all_images: use images of a folder without splits even if the run was trained on them. Otherwise, use the images
            that the run held out.

    Returns:
        The labeled images, and a line of text that describes how the names of the subfolders were mapped to classes.

    Raises:
        FolderError: the folder or the split does not exist, the folder has splits but no split ``calibration``, or a
            subfolder cannot be mapped to a class.
    """
    if not os.path.isdir(folder):
        raise FolderError(f"the data directory {folder} does not exist")
    name = Path(os.path.abspath(folder)).name  # without parent folders, because users may share the calibrated file
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
    if not chosen:
        fraction, seed, note = images_to_use(folder, {"the model": trained_on}, all_images=all_images)
        summary = f"{note}; {summary}"
        if fraction:
            # of the files that training reads, with its numbers of classes: in natural order of the names
            read = [
                (path, found.names.index(name)) for path, name in found.images if path.lower().endswith(IMAGE_SUFFIXES)
            ]
            trained = np.asarray([label for _, label in read], np.int64)
            counts = np.bincount(trained, minlength=len(found.names)).tolist()
            held = held_out_indices(trained, counts, fraction, seed=seed)
            files = {read[i][0] for i in held}
            known = [(path, label) for path, label in known if path in files]
    labels = np.asarray([label for _, label in known], np.int64)
    return Images(name, [path for path, _ in known], labels), "; ".join([f"{folder}: {summary}", *found.notes])


def calibrate_file(
    model: str | Path,
    output: str | Path,
    data: Images | Arrays | KnownLogits,
    *,
    alpha: float = 0.1,
    score: Score | None = None,
    rule: str = "marginal",
    temperature: float | None = None,
    report_share: float = 0.5,
    seed: int = 0,
    batch_size: int = 32,
    force: bool = False,
    device: str = "auto",
    progress: Progress = lambda items, total: items,
) -> Calibration:
    """Calibrate an exported ONNX file on labeled images, and write a new file that also computes prediction sets.

    A prediction set is a set of classes that contains the true class with probability 1 - alpha or more. The function
    writes the new file atomically. The function skips images that cannot be read, with a warning.

    Args:
        model: ONNX file that :func:`topk_export.export_onnx` or an earlier calibration wrote.
        output: file to write. ``output`` must not be the file ``model``.
        data: labeled images that were used neither for training nor for model selection.
        alpha: probability with which a set may miss the true class, between 0 and 1. The new file uses this value by
            default. The input ``alpha`` of the new file can select another value from 0.005 to 0.5, in steps of 0.005.
        score: nonconformity score, which is small if a class fits the image. The set contains the classes with scores
            of at most a threshold. Default: ``lac``, the score -log(probability).
        rule: ``"marginal"`` for one threshold, or ``"per-class"`` for one threshold per class. With ``"marginal"``, the
            probability 1 - alpha is an average over all classes. With ``"per-class"``, each class has this probability.
        temperature: the probabilities in the score are softmax(logits / temperature). The other outputs of the file do
            not use this temperature. By default, a random fifth of the data fits the temperature, and gives neither
            thresholds nor coverage; if a fifth has fewer than 100 rows, the temperature is 1.
        report_share: fraction of the other data with which the function measures the coverage. The rest determines the
            thresholds.
        seed: seed of the random split into these parts.
        batch_size: number of images per run of the model.
        force: calibrate even if the labels contradict the predictions of the model. The sets then have no guarantee.
        device: device that runs the model, as in :class:`topk_export.Predictor`.
        progress: function ``(batches, count)`` that returns an iterator over ``batches``, for example a progress bar.
            ``count`` is the number of batches.

    Returns:
        A :class:`Calibration`, which contains the thresholds and the measured coverage.

    Raises:
        WrongLabelsError: the labels contradict the predictions of the model, and ``force`` is False.
        ModelFileError: ``model`` is not an exported file, or is a multilabel file.
        ImageError: more than half of the images cannot be read.
        ValueError: ``output`` is ``model``, there are too few images for ``alpha``, or an argument is out of range.
    """
    output, score = Path(output), score or Score()
    if output.exists() and output.samefile(model):
        raise ValueError(f"the output {output} is the input: choose another file")
    predictor = Predictor(model, device=device)
    metadata = predictor.metadata
    if metadata.multilabel:
        raise ModelFileError(f"{model} is a multilabel file: prediction sets need a file with one label per image")
    n, names = metadata.num_classes, metadata.class_names
    proto = graph.load(model)
    graph.check_weights_stay(proto, Path(model), output)
    if len(graph.value_shape(proto.graph, LOGITS)) != 2:
        raise ModelFileError(f"{model} has several positions per input: prediction sets need one label per input")
    labels = check_labels(data.labels, n)
    logits, labels, earlier = _logits_of(predictor, data, labels, batch_size, progress)
    order = np.random.default_rng(seed).permutation(len(labels))
    fitting, order, temperature, source = _fit(logits, labels, order, temperature)
    calibrate, report = np.split(order, [len(order) - round(report_share * len(order))])
    check_size(len(calibrate), alpha)
    if not len(report):
        raise ValueError("no images are left for the report: use more images or a larger --report-share")
    agreed = agreement(logits.argmax(-1), labels, names)
    agreed.check(force=force)
    scores = label_scores(proto, score, temperature, logits[calibrate], labels[calibrate])
    levels = all_levels(alpha)
    table = threshold_table(scores, labels[calibrate], n, rule=rule, levels=levels)
    sets = PredictionSets(score, levels, table, alpha, temperature)
    built = add_sets(proto, sets)
    counts = SetCounts.of(_head_sets(built, logits[report]), labels[report])
    seen = np.bincount(labels[calibrate], minlength=n)
    facts = {
        **_facts(sets, agreed.problem, calibrate, report, counts, seen),
        "temperature_source": source,
        "temperature_samples": len(fitting),
        "all_samples": len(labels),
        "notes": _notes(sets, names, seen, logits, scores, agreed.note),
        "top1": round(agreed.accuracy, 6),
        "data": data.name,
        "seed": seed,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    _write(built, sets, metadata, facts, Path(model), output)
    return Calibration(sets, facts, counts, seen, names, earlier, agreed.confused)


def _fit(
    logits: np.ndarray, labels: np.ndarray, order: np.ndarray, temperature: float | None
) -> tuple[np.ndarray, np.ndarray, float, str]:
    """Return the rows that fit the temperature, the other rows, the temperature, and a text that says where it is from.

    The rows are drawn without regard to their labels. If the share per class was fixed, the other rows would not be
    exchangeable with new data, and the guarantee would be lost.
    """
    if temperature is not None:
        return order[:0], order, float(temperature), "as given"
    count = round(FIT_SHARE * len(order))
    if count < FEWEST_TO_FIT:
        return order[:0], order, 1.0, f"not fitted: a fifth of the data has fewer than {FEWEST_TO_FIT} images"
    fitting, rest = order[:count], order[count:]
    return fitting, rest, fit_temperature(logits[fitting], labels[fitting]), f"fitted on {count} other images"


def _notes(
    sets: PredictionSets, names: Sequence[str], seen: np.ndarray, logits: np.ndarray, scores: np.ndarray, note: str
) -> list[str]:
    """Return remarks for the report and the file."""
    notes = [note] if note else []
    missing: list[str] = [name for name, count in zip(names, seen, strict=True) if not count]
    if missing:
        notes.append(
            f"{len(missing)} of {len(names)} classes have no calibration images, and the guarantee is an average over "
            f"the other classes: {listed(missing, 5)}"
        )
    if full := int(np.isposinf(sets.thresholds()).sum() if sets.rule == "per-class" else 0):
        notes.append(f"{full} classes have fewer than {fewest(sets.alpha)} calibration images: they are in every set")
    distinct = len(np.unique(logits, axis=0))
    if distinct < (1 - MAX_REPEATED) * len(logits):
        notes.append(
            f"only {distinct} of {len(logits)} rows of logits differ: copies of an image do not count as new images, "
            "so the interval of the coverage is too narrow"
        )
    limit = sets.thresholds()[0]
    tied = float((scores == limit).mean())
    if sets.rule == "marginal" and np.isfinite(limit) and tied > MAX_TIED and len(scores) * tied >= 2:
        notes.append(
            f"{tied:.1%} of the calibration scores equal the threshold, because the probabilities round to the same "
            "numbers: the sets are larger than necessary"
        )
    return notes


def label_scores(proto: Any, score: Score, temperature: float, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the nonconformity score of the label of each image [N]. The score is small if the label fits the image.

    The function runs the same ONNX nodes that the calibrated file will contain. The nodes divide the logits [N, n] by
    ``temperature`` before the softmax. ``proto`` is the exported model, a ModelProto.
    """
    session = open_session(score_model(proto, score, temperature).SerializeToString(), device="cpu")
    parts = []
    for start in range(0, len(labels), BATCH):
        scores = session.run([SCORES], {LOGITS: logits[start : start + BATCH]})[0]
        parts.append(scores[np.arange(len(scores)), labels[start : start + BATCH]])
    values = np.concatenate(parts)
    values[values >= LARGEST] = np.inf
    values[values <= -LARGEST] = -np.inf
    return values


def too_low(hits: int, total: int, samples: int, alpha: float) -> bool:
    """Return whether too few prediction sets contain their label to be chance: ``hits`` of the ``total`` sets.

    The threshold of the sets was computed from ``samples`` other images, for a coverage of 1 - ``alpha``. The function
    returns True if, for images from one source, at most ``hits`` sets contain their label with probability below 1 %.
    """
    # A set contains the label if the score of the label is at most the j-th smallest calibration score. So at most
    # `hits` sets contain the label if at least j of the j + `hits` smallest scores are calibration scores.
    j = order_of(samples, alpha)
    smallest = j + hits
    ways = [_log_choose(samples, i) + _log_choose(total, smallest - i) for i in range(j, min(samples, smallest) + 1)]
    return sum(math.exp(way - _log_choose(samples + total, smallest)) for way in ways) < 0.01


def _log_choose(n: int, i: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1)


def _logits_of(
    predictor: Predictor, data: Images | Arrays | KnownLogits, labels: np.ndarray, size: int, progress: Progress
) -> tuple[np.ndarray, np.ndarray, SetCounts | None]:
    """Return the logits and labels of the data, and the counts of the prediction sets that the model already has."""
    n = predictor.metadata.num_classes
    earlier = None
    if isinstance(data, KnownLogits):
        return _check_logits(data.logits, n, labels), labels, None
    logits = np.zeros((len(labels), n), np.float32)
    known = np.zeros(len(labels), bool)
    for rows, batch in _batches(predictor, data, size, progress):
        outputs = predictor.run(batch)
        logits[rows], known[rows] = outputs[LOGITS], True
        if SET in outputs:
            counts = SetCounts.of(outputs[SET], labels[rows])
            earlier = counts if earlier is None else earlier + counts
    labels = labels[known]
    return _check_logits(logits[known], n, labels), labels, earlier


def _check_logits(logits: np.ndarray, n: int, labels: np.ndarray) -> np.ndarray:
    logits = np.asarray(logits)
    if logits.ndim != 2 or logits.shape[1] != n or logits.dtype.kind not in "fiu":
        raise ValueError(f"expected logits [N, {n}], got {logits.dtype} {list(logits.shape)}")
    if len(logits) != len(labels):
        raise ValueError(f"expected one label per row, got {len(labels)} for {len(logits)} rows")
    if len(bad := np.flatnonzero(~np.isfinite(logits.max(-1)))):
        raise ExportError(f"the logits of {len(bad)} rows are not finite; the first is number {bad[0]}")
    return logits.astype(np.float32)


def _batches(
    predictor: Predictor, data: Images | Arrays, size: int, progress: Progress
) -> Iterator[tuple[np.ndarray, Any]]:
    """Yield the row numbers and the inputs of each batch. Skip images that cannot be read, with a warning."""
    count = len(data.labels)
    starts = range(0, count, size)
    if isinstance(data, Arrays):
        if wrong := [len(values) for values in data.inputs.values() if len(values) != count]:
            raise ValueError(f"expected one label per row, got {count} for {wrong[0]} rows")
        for start in progress(starts, len(starts)):
            part = {name: values[start : start + size] for name, values in data.inputs.items()}
            yield np.arange(start, min(start + size, count)), part
        return
    predictor.metadata.images  # noqa: B018 - raises an error if the file takes no images
    images = data.images
    broken: list[ImageError] = []
    batches = read_ahead(
        lambda i: predictor.try_input_of(images[i]), range(count), batch=size, workers=predictor.workers
    )
    for start, batch in zip(progress(starts, len(starts)), batches, strict=True):
        broken += [x for x in batch if isinstance(x, ImageError)]
        if good := {i: x for i, x in enumerate(batch, start) if not isinstance(x, ImageError)}:
            yield np.asarray(list(good)), np.stack(list(good.values()))
    if broken:
        message = f"{len(broken)} of {count} images cannot be read, such as: {broken[0]}"
        if 2 * len(broken) > count:
            raise ImageError(message)
        warnings.warn(f"skipped images: {message}", stacklevel=4)


def _head_sets(built: Any, logits: np.ndarray) -> np.ndarray:
    session = open_session(graph.head_model(built).SerializeToString(), device="cpu")
    parts = [session.run([SET], {LOGITS: logits[i : i + BATCH]})[0] for i in range(0, len(logits), BATCH)]
    return np.concatenate(parts)


def _facts(
    sets: PredictionSets, problem: str, calibrate: np.ndarray, report: np.ndarray, counts: SetCounts, seen: np.ndarray
) -> dict[str, Any]:
    summary, limits = counts.summary(), sets.thresholds()
    promise = guarantee(sets.rule, sets.alpha)
    if missing := int((seen == 0).sum()):
        promise += f"; classes without calibration images ({missing} of {len(seen)}) are not covered by this promise"
    forced = f"calibrated with --force although labels look wrong: {problem}" if problem else ""
    return {
        "score": sets.score.name,
        "options": sets.score.options,
        "rule": sets.rule,
        "alpha": sets.alpha,
        "alphas": list(sets.levels),
        **digest_of_table(sets),
        "temperature": sets.temperature,
        "guarantee": "none, because the labels of the calibration looked wrong" if forced else promise,
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
    stamped = replace(metadata, sets=facts, outputs={**metadata.outputs, **SET_OUTPUTS})
    graph.set_metadata(built, graph.metadata_of(built) | stamped.to_props())
    with staged_at(output) as staged:
        graph.save(built, staged, source=model.parent)
        written = Predictor(staged, device="cpu")
        sample = beside(model, SAMPLE)  # not every model takes random inputs
        inputs = load_sample(sample).inputs if sample.is_file() else inputs_for(written.session, metadata)
        outputs = written.run({name: x[None] if metadata.batch == 0 else x for name, x in inputs.items()})
        expected, near = expected_sets(outputs[LOGITS], facts, sets.thresholds())
        if ((outputs[SET] != expected) & ~near).any():
            raise ExportError("the sets of the calibrated file do not match the thresholds: the file was not written")
        if sample.is_file():
            shutil.copyfile(sample, beside(staged, SAMPLE))
