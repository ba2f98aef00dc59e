"""Data sets of a run: timm's by timm's names, registered ones by ``topk/NAME``, made harder on request."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from timm.data import ImageDataset, create_dataset

from topk_registry import registry
from topk_registry.data.labels import (
    Labels,
    class_counts,
    class_names_of,
    is_indexed,
    kept_labels_of,
    labels_of,
)
from topk_registry.train.errors import DataError
from topk_studies.old_trainer.config.config import TrainConfig
from topk_studies.old_trainer.config.tasks import MULTILABEL
from topk_studies.old_trainer.data.contract import first_problem
from topk_studies.old_trainer.data.corrections import Corrections, digest_of, read_corrections
from topk_studies.old_trainer.data.names import class_words, sample_names
from topk_studies.old_trainer.data.recipes import (
    Indices,
    Selection,
    fraction_counts,
    hold_out,
    long_tail_counts,
    pick,
)
from topk_studies.old_trainer.folders.classes import ClassMap
from topk_studies.old_trainer.folders.images import count_of, listed, split_folder
from topk_studies.old_trainer.setup import sampler
from topk_studies.old_trainer.setup.batches import seeded
from topk_studies.old_trainer.setup.classes import align, folder_reader, is_visible_image, without_images
from topk_studies.old_trainer.setup.label_sets import (
    FOLDER,
    check_label_sets,
    encoder,
    hold_out_sets,
    open_table,
    positives_of,
    reader_settings,
    table_of,
    unlabelled_classes,
    without_positives,
)
from topk_studies.old_trainer.setup.noise import check_noise, noisy_of
from topk_studies.old_trainer.setup.shards import Shards
from topk_studies.old_trainer.setup.splits import check_apart, check_split, is_folder
from topk_studies.old_trainer.setup.unreadable import WatchedImages, replace_within

PREFIX = "topk/"
SHARDS = "wds/"
STREAMS = ("hfids/", "tfds/", SHARDS)
_STREAM = (
    "--dataset {} is a stream: --label-noise, --label-file, --long-tail, --subset, --exclude, --relabel and a "
    "fractional --val-split need a data set whose samples can be picked"
)


@dataclass
class Data:
    """Training and evaluation data, and what is known of their classes; ``counts`` are the images of each class."""

    train: Any
    validation: Any = None
    class_names: list[str] | None = None
    counts: list[int] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def num_classes(self) -> int | None:
        """Classes that the names or else the labels show; None where neither is known."""
        return len(self.class_names or self.counts or ()) or None

    @property
    def num_samples(self) -> int | None:
        """Images of the training data; None of a stream."""
        return len(self.train) if is_indexed(self.train) else None


def check_data_arguments(config: TrainConfig) -> None:
    """Refuse wrong settings of the data before any is read."""
    stream = config.dataset.lower().startswith(STREAMS)
    if stream and _picks(config):
        raise DataError(_STREAM.format(config.dataset))
    if stream:
        sampler.check_indexed(config, config.dataset)
    corrections_of(config)
    check_noise(config)
    if not 0.0 < config.subset <= 1.0:
        raise DataError(f"--subset must be in (0, 1], got {config.subset}")
    _check_fold(config)
    if config.imbalance_factor < 1.0:
        raise DataError(f"--imbalance-factor must be at least 1, got {config.imbalance_factor}")
    if config.dataset.lower().startswith(SHARDS) and find_spec("webdataset") is None:
        raise DataError(f"--dataset {config.dataset} needs webdataset: pip install 'topk-registry[shards]'")
    if config.dataset.startswith(PREFIX):
        registry.datasets.builder(config.dataset.removeprefix(PREFIX))
    elif "/" not in config.dataset and not os.path.exists(config.data_dir or ""):
        raise DataError(f"the data directory {config.data_dir!r} does not exist")


def check_training_data(config: TrainConfig) -> None:
    """Refuse splits that do not exist, and an evaluation that would read the training images unasked."""
    check_data_arguments(config)
    if config.task == MULTILABEL:
        check_label_sets(config, held_out=bool(held_out_fraction(config)))
        if config.labels_csv:
            return
    for split in (config.train_split, config.val_split):
        if split and not (split == config.val_split and held_out_fraction(config)):
            check_split(config, split)
    if not held_out_fraction(config):
        check_apart(config)


def corrections_of(config: TrainConfig) -> dict[str, Corrections]:
    """The rows of ``--exclude`` and ``--relabel``, where they are given."""
    files = {"exclude": config.exclude, "relabel": config.relabel}
    try:
        return {action: read_corrections(file, action) for action, file in files.items() if file}
    except ValueError as error:
        raise DataError(f"{error}") from error


def file_digests(config: TrainConfig) -> dict[str, Any]:
    """Digests of the files that a run reads (corrections, class weights, label tables), by what they are for."""
    files = {"exclude": config.exclude, "relabel": config.relabel}
    digests = {action: digest_of(file) for action, file in files.items() if file}
    read = {"class_weight_file": config.class_weight, "loss_pos_weight_file": config.loss_pos_weight}
    read |= {"class_stats_file": config.class_stats, "label_file_digest": config.label_file}
    weights = {name: digest_of(file) for name, file in read.items() if os.path.isfile(file)}
    tables = {split: digest_of(table_of(config, split)) for split in (config.train_split, config.val_split)
              if config.labels_csv and table_of(config, split).is_file()}  # fmt: skip
    return ({"corrections": digests} if digests else {}) | weights | ({"label_files": tables} if tables else {})


def held_out_fraction(config: TrainConfig) -> float | None:
    """The fraction that ``--val-split`` holds out, or None where it is a name."""
    try:
        fraction = float(config.val_split)
    except ValueError:
        return None
    if not 0.0 < fraction < 1.0:
        raise DataError(f"a fractional --val-split must be in (0, 1), got {config.val_split}")
    return fraction


def _check_fold(config: TrainConfig) -> None:
    fraction = held_out_fraction(config)
    if fraction is None:
        if config.val_fold:
            raise DataError(f"--val-fold needs a fractional --val-split, got --val-split {config.val_split!r}")
        return
    folds = round(1 / fraction)
    if not 0 <= config.val_fold < folds:
        raise DataError(
            f"--val-split {config.val_split} has {folds} parts, --val-fold 0 to {folds - 1}, got {config.val_fold}"
        )


def open_data(config: TrainConfig, *, channels: int = 3, needs_counts: bool = False) -> Data:
    """The training and evaluation data of a run; ``needs_counts`` reads the class counts, whatever that costs.

    Labels are made noisy and classes thinned out in training alone; what is held out for evaluation is taken first.
    """
    try:
        return _open_data(config, channels, needs_counts)
    except ValueError as error:  # labels out of range, superclasses that are not known
        raise DataError(f"{name_of(config)}: {error}") from error


def _open_data(config: TrainConfig, channels: int, needs_counts: bool) -> Data:
    train = open_split(config, config.train_split, training=True, channels=channels)
    fraction = held_out_fraction(config)
    harder = _picks(config)
    several = config.task == MULTILABEL
    data = Data(train, class_names=class_names_of(train), notes=notes_of(train))
    if config.val_split and not fraction:
        data.validation = open_split(config, config.val_split, training=False, channels=channels)
        where = f"split {config.val_split!r} of {name_of(config)}"
        align_evaluation(data, where, ignore=config.ignore_unknown_classes, several=several)
    if harder and not is_indexed(train):
        raise DataError(_STREAM.format(config.dataset))
    if is_indexed(train):
        if len(train) == 0:
            raise DataError(f"the training split {config.train_split!r} of {name_of(config)} is empty")
        if harder:
            twin = open_split(config, config.train_split, training=True, channels=channels) if fraction else None
            if several:  # nothing else than a fraction to hold out passes check_task
                data.train, data.validation, held = hold_out_sets(config, train, twin, fraction or 0.0)
                data.notes.append(held)
            else:
                _harden(config, data, train, twin, fraction)
        if several:
            data.counts, told = positives_of(data.train, read=needs_counts)
            data.notes += told
        elif not harder:
            labels = labels_of(train) if needs_counts else kept_labels_of(train)
            data.counts = None if labels is None else counts_of(config, data, labels)
    if data.validation is not None and data.class_names:
        missing = (without_positives if several else without_images)(data.validation, data.class_names)
        if missing and several:
            data.notes.append(unlabelled_classes(missing))
        elif missing:
            data.notes.append(f"no evaluation images of {count_of(missing, 'class')}: {listed(missing)}")
    return data


def align_evaluation(data: Data, where: str, *, ignore: bool, several: bool = False) -> None:
    """Give the evaluation data, of several labels an image or of one, the class numbers of training.

    Raises:
        DataError: it has classes that training lacks.
    """

    def note(mapping: ClassMap) -> None:
        if mapping.left_out:
            data.notes.append(f"classes of {where} that training lacks are left out: {listed(mapping.left_out)}")

    data.validation = align(
        data.validation,
        data.class_names,
        where=where,
        of="training",
        by_order=False,
        ignore_unknown=ignore,
        note=note,
        several=several,
    )


def open_split(config: TrainConfig, split: str, *, training: bool, channels: int = 3, flat: bool = False) -> Any:
    """One split, as timm or a registered factory makes it; its transform is set later.

    ``flat`` takes a folder of images that name no class, where their labels do not matter.
    """
    if not config.labels_csv:
        check_split(config, split)
    mode = config.input_img_mode or ("RGB" if channels == 3 else "L")
    try:
        if config.dataset.startswith(PREFIX):
            return _open_registered(config, split)
        if config.labels_csv:
            return open_table(config, split, mode)
        if config.task == MULTILABEL and "/" not in config.dataset:
            raise ValueError(FOLDER)
        if is_folder(config) and "/" not in config.dataset:
            root = Path(config.data_dir or "")
            reader = folder_reader(config, split_folder(root, split) or root, flat=flat)
            return WatchedImages(reader, mode=mode, strict=config.strict_data)
        several = config.task == MULTILABEL
        settings: dict[str, Any] = {"class_map": config.class_map, "repeats": config.epoch_repeats if training else 0}
        settings |= reader_settings(config) if several else {}
        if is_folder(config):
            settings["is_valid_file"] = is_visible_image
        dataset: Any = create_dataset(
            config.dataset,
            root=config.data_dir,
            split=split,
            is_training=training,
            download=config.dataset_download,
            batch_size=config.batch_size,
            seed=config.seed,
            input_img_mode=mode,
            input_key=config.input_key,
            target_key=config.target_key,
            num_samples=config.train_num_samples if training else config.val_num_samples,
            trust_remote_code=config.dataset_trust_remote_code,
            **settings,
        )
        encode = encoder(config, getattr(dataset, "reader", dataset)) if several else None
        if isinstance(dataset, ImageDataset):
            return WatchedImages(dataset.reader, mode=mode, strict=config.strict_data, target_transform=encode)
        if config.dataset.lower().startswith(SHARDS):
            dataset = Shards(dataset.reader, seed=config.seed, training=training)
        if several:
            dataset.target_transform = encode
        return dataset
    except (OSError, RuntimeError, TypeError, ValueError, AssertionError, ImportError) as error:
        raise DataError(f"cannot open split {split!r} of {name_of(config)}: {error}") from error


def _open_registered(config: TrainConfig, split: str) -> Any:
    name = config.dataset.removeprefix(PREFIX)
    dataset = registry.datasets.create(name, split=split, **config.dataset_opt)
    with seeded(config.seed):  # one that draws its samples draws this one apart from the run's
        problem = first_problem(dataset, several=config.task == MULTILABEL)
    if problem:
        raise ValueError(f"{problem}; `topk-registry check-dataset {name}` tries all that training asks of it")
    return dataset


def open_named(
    name: str, split: str, *, folder: str | None, options: dict[str, Any], download: bool, **settings: Any
) -> Any:
    """One split of a data set by the name that ``timm train --dataset`` takes, for evaluation.

    Args:
        name: of the data set; empty for a folder.
        split: of the data set.
        folder, options, download: where it lies, what it takes, and whether it may download itself.
        settings: further flags of ``timm train``, such as ``task`` and ``labels_csv``.
    """
    config = TrainConfig(dataset=name, data_dir=folder, dataset_opt=options, dataset_download=download, **settings)
    return open_split(config, split, training=False)


def notes_of(dataset: Any) -> list[str]:
    """Sentences on what was left out of a data set."""
    return list(getattr(getattr(dataset, "reader", None), "notes", ()))


def name_of(config: TrainConfig) -> str:
    return " in ".join(
        filter(None, [config.dataset or "image folder", repr(config.data_dir) if config.data_dir else ""])
    )


def counts_of(config: TrainConfig, data: Data, labels: Labels) -> list[int]:
    """Samples of each class; the number of classes is the configured one, the data's, or what the labels show."""
    return class_counts(labels, config.num_classes or data.num_classes or int(labels.max()) + 1)


def _picks(config: TrainConfig) -> bool:
    """Whether training takes a part of the samples, or other labels than theirs."""
    harder = config.label_noise or config.label_file or config.long_tail or config.subset != 1.0
    return bool(harder or config.exclude or config.relabel or held_out_fraction(config))


def _harden(config: TrainConfig, data: Data, train: Any, twin: Any, fraction: float | None) -> None:
    labels = labels_of(train)
    counts = counts_of(config, data, labels)
    indices = None
    if fraction:
        indices, held = hold_out(labels, counts, fraction, seed=config.seed, fold=config.val_fold)
        # a second copy of the split: evaluation has a transform of its own
        data.validation = Selection(twin, held, labels)
        replace_within(twin, held)
        data.notes.append(f"held out {len(held)} training images, {fraction:g} of each class, for evaluation")
    kept = labels if indices is None else labels[indices]
    chosen = pick(kept, _kept_counts(config, class_counts(kept, len(counts)), data.notes), seed=config.seed)
    indices = chosen if indices is None else indices[chosen]
    noisy, said = noisy_of(config, train, labels, indices, len(counts))
    data.notes += said
    noisy, indices = _corrected(config, data, train, labels if noisy is None else noisy, indices)
    data.train = Selection(train, indices, labels, noisy)
    replace_within(train, indices)
    data.counts = class_counts(data.train.targets, len(counts))


def _corrected(config: TrainConfig, data: Data, train: Any, labels: Labels, indices: Indices) -> tuple[Labels, Indices]:
    """The labels [N] and the samples in use after ``--relabel`` and ``--exclude``.

    What is held out stays as it is, so that runs with and without corrections are measured on the same labels.
    """
    corrections = corrections_of(config)
    if not corrections:
        return labels, indices
    classes = class_words(data.class_names, config.num_classes or data.num_classes or int(labels.max()) + 1)
    names, used = sample_names(train, config.data_dir), np.zeros(len(labels), bool)
    used[indices] = True
    places = {action: each.places(names, labels, classes, config.data_dir) for action, each in corrections.items()}
    if "relabel" in corrections:
        before, labels = labels, labels.copy()
        labels[places["relabel"]] = corrections["relabel"].suggestions(classes)
        changed = int((labels != before)[used].sum())
        data.notes.append(f"relabelled {changed} of {len(indices)} training images by {config.relabel}")
    if "exclude" in corrections:
        before, indices = indices, np.setdiff1d(indices, places["exclude"])
        data.notes.append(f"excluded {len(before) - len(indices)} of {len(before)} training images by {config.exclude}")
        if not len(indices):
            raise DataError(f"--exclude {config.exclude} leaves no training image")
    data.notes += _left_rows(corrections)
    idle = sum(int((~used[samples]).sum()) for samples in places.values())
    if idle:
        data.notes.append(f"{idle} of the rows are of images that are held out or not in use, and change nothing")
    return labels, indices


def _left_rows(corrections: dict[str, Corrections]) -> list[str]:
    """Say which rows of a file are for the flag that it was not given to."""
    files = {action: os.path.realpath(each.file) for action, each in corrections.items()}
    return [
        f"{each.file} has {count} rows with the action {other}, which --{action} leaves: give it to --{other}, too"
        for action, each in corrections.items()
        for other, count in each.others.items()
        if files.get(other) != files[action]
    ]


def _kept_counts(config: TrainConfig, counts: Sequence[int], notes: list[str]) -> list[int]:
    kept = list(counts)
    if config.subset != 1.0:
        kept = fraction_counts(kept, config.subset)
        notes.append(f"subset {config.subset:g}: {sum(kept)} of {sum(counts)} training images")
    if config.long_tail:
        kept = long_tail_counts(kept, config.long_tail, config.imbalance_factor)
        notes.append(f"long tail ({config.long_tail}): {max(kept)} to {min(kept)} images a class, {sum(kept)} in all")
    return kept
