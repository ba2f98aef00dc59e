"""Scores of models over images: from the cache where they were kept, else from one pass with a progress bar."""

import hashlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from topk_registry.evaluation.cache import Entry, default_folder
from topk_registry.evaluation.images import Images
from topk_registry.evaluation.models import ModelFile, Running, data_settings, given_settings, model_file
from topk_registry.folders.classes import class_map
from topk_registry.folders.images import listed
from topk_registry.train.errors import DataError, TrainError


@dataclass(frozen=True)
class Predictions:
    """The scores of a model over images.

    Args:
        name: of the model, for tables.
        logits: scores [N, n]; their softmax is the model's probabilities.
        labels: of the images [N].
        class_names: of the columns.
        images: under these class numbers.
    """

    name: str
    logits: np.ndarray
    labels: np.ndarray
    class_names: tuple[str, ...]
    images: Images


def predictions_of(paths: Sequence[str | Path], args: Any) -> list[Predictions]:
    """Return the scores of each model over the images that a command's flags name.

    Where the flags name no data it is the data that the first model, a checkpoint, was evaluated on. All models get the
    class order of the first.

    Args:
        paths: checkpoints, folders of training runs, or other model files.
        args: the flags of :func:`topk_registry.evaluation.flags.add_flags`.
    """
    given = given_settings(vars(args))
    named = given.get("data_dir") or given.get("dataset")
    images = Images.open(given if named else {**data_settings(paths[0]), **given})
    running = Running(args.device, args.batch_size, args.workers, args.use_ema)
    folder = None if args.no_cache else Path(args.cache or default_folder())
    predictions: list[Predictions] = []
    for path, name in zip(paths, names_of(paths), strict=True):
        mine = predict(model_file(path, running), images, name=name, folder=folder)
        for note in () if predictions else mine.images.notes:
            print(f"{mine.images.name}: {note}", file=sys.stderr)
        predictions.append(in_order_of(predictions[0], mine) if predictions else mine)
    return predictions


def predict(model: ModelFile, images: Images, *, name: str, folder: Path | None = None) -> Predictions:
    """Run a model over images, or read its scores where they were kept.

    Args:
        model: in a file.
        images: under class numbers of their own.
        name: of the model, for the table and the progress bar.
        folder: of kept scores; None keeps none.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="topk-scores-") as temporary:
            predictions = _predict(model, images, name, Entry(Path(temporary)))
            return Predictions(
                name, np.array(predictions.logits), predictions.labels, predictions.class_names, predictions.images
            )
    key = hashlib.sha256(f"{model.fingerprint} {images.fingerprint}".encode()).hexdigest()
    return _predict(model, images, name, Entry(folder / key[:32]))


def _predict(model: ModelFile, images: Images, name: str, entry: Entry) -> Predictions:
    aligned = None
    if not entry.complete:
        opened = model.open(images)
        aligned = images.aligned(opened.class_names)
        start = entry.begin(opened.class_names)
        if start and not images.indexed:
            start = 0  # a stream has no place to go on from
        total = len(aligned) if aligned.indexed else None
        with tqdm(total=total, initial=start, desc=name, unit=" images", disable=None) as bar:
            if total is None or start < total:
                opened.run(aligned, _Writer(entry, start, bar.update), start=start)
        entry.finish()
    names = entry.class_names() or []
    logits, labels = entry.read()
    if not len(labels):
        raise DataError(f"{images.name} holds no image")
    bad = np.flatnonzero(~np.isfinite(logits).all(-1))
    if len(bad):
        raise TrainError(f"the scores of {name} are not finite for {len(bad)} images; the first is number {bad[0]}")
    return Predictions(name, logits, labels, tuple(names), aligned or images.aligned(names))


class _Writer:
    """Puts batch after batch into an entry."""

    def __init__(self, entry: Entry, start: int, done: Callable[[int], object]) -> None:
        self.entry, self.next, self.done = entry, start, done

    def __call__(self, scores: np.ndarray, labels: np.ndarray) -> None:
        self.entry.put(self.next, scores, labels)
        self.next += len(labels)
        self.done(len(labels))


def in_order_of(first: Predictions, other: Predictions) -> Predictions:
    """The scores of another model under the class numbers of the first.

    Raises:
        DataError: the models have other classes, or read other images.
    """
    if len(other.class_names) != len(first.class_names):
        raise DataError(
            f"{first.name} has {len(first.class_names)} classes, {other.name} has {len(other.class_names)}: models are "
            "compared on the same classes"
        )
    mapping = class_map(first.class_names, other.class_names, where=first.name, of=other.name)
    columns = np.asarray([mapping.numbers[name] for name in first.class_names])
    if (columns == np.arange(len(columns))).all():
        logits, labels = other.logits, other.labels
    else:
        logits, labels = other.logits[:, columns], np.argsort(columns)[other.labels]
    if not np.array_equal(labels, first.labels):
        raise DataError(
            f"{first.name} and {other.name} read other images or labels of {first.images.name}: {len(first.labels)} "
            f"and {len(labels)} images"
        )
    return Predictions(other.name, logits, labels, first.class_names, first.images)


def names_of(paths: Sequence[str | Path]) -> list[str]:
    """Short names of files, no two equal: the last part of the path, or as many as it takes."""
    parts = [Path(path).absolute().parts for path in paths]
    if len(set(parts)) < len(parts):
        raise TrainError(f"a model is named twice: {listed([str(path) for path in paths])}")
    size = next(i for i in range(1, 1 + max(map(len, parts))) if len({p[-i:] for p in parts}) == len(parts))
    return ["/".join(p[-size:]) for p in parts]
