"""The data sets of a run: timm's by timm's names, registered ones by ``topk/NAME``, made harder where asked."""

import os
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from timm.data import ImageDataset, create_dataset

from topk_registry import registry
from topk_registry.data.labels import (
    Labels,
    class_counts,
    class_names_of,
    is_indexed,
    kept_labels_of,
    labels_of,
    superclasses_of,
)
from topk_registry.data.recipes import Selection, fraction_counts, hold_out, long_tail_counts, noisy_labels, pick
from topk_registry.train.errors import DataError
from topk_registry.train.setup.splits import check_apart, check_split
from topk_registry.train.setup.unreadable import WatchedImages

PREFIX = "topk/"
STREAMS = ("hfids/", "tfds/", "wds/")
_STREAM = (
    "--dataset {} is a stream: --label-noise, --long-tail, --subset and a fractional --val-split need a data set whose "
    "samples can be picked"
)


@dataclass
class Data:
    """Training and evaluation data, and what is known of their classes."""

    train: Any
    validation: Any = None
    num_classes: int | None = None
    counts: list[int] | None = None
    notes: list[str] = field(default_factory=list)


def check_data_arguments(args: Namespace) -> None:
    """Refuse what can be refused before any data is read."""
    stream = args.dataset.lower().startswith(STREAMS)
    harder = args.label_noise or args.long_tail or args.subset != 1.0 or held_out_fraction(args)
    if stream and harder:
        raise DataError(_STREAM.format(args.dataset))
    if not 0.0 <= args.label_noise <= 1.0:
        raise DataError(f"--label-noise must be in [0, 1], got {args.label_noise}")
    if not 0.0 < args.subset <= 1.0:
        raise DataError(f"--subset must be in (0, 1], got {args.subset}")
    if args.imbalance_factor < 1.0:
        raise DataError(f"--imbalance-factor must be at least 1, got {args.imbalance_factor}")
    if args.dataset.startswith(PREFIX):
        registry.datasets.builder(args.dataset.removeprefix(PREFIX))
    elif "/" not in args.dataset and not os.path.exists(args.data_dir or ""):
        raise DataError(f"the data directory {args.data_dir!r} does not exist")


def check_training_data(args: Namespace) -> None:
    """Refuse splits that do not exist, and an evaluation that would read the training images unasked."""
    check_data_arguments(args)
    for split in (args.train_split, args.val_split):
        if split and not (split == args.val_split and held_out_fraction(args)):
            check_split(args, split)
    if not held_out_fraction(args):
        check_apart(args)


def held_out_fraction(args: Namespace) -> float | None:
    """The fraction that ``--val-split`` asks to hold out, where it is a number and no name."""
    try:
        fraction = float(args.val_split)
    except ValueError:
        return None
    if not 0.0 < fraction < 1.0:
        raise DataError(f"a fractional --val-split must be in (0, 1), got {args.val_split}")
    return fraction


def open_data(args: Namespace, *, channels: int = 3, needs_counts: bool = False) -> Data:
    """The training and evaluation data of a run; ``needs_counts``: read the class counts, whatever that costs.

    Labels are made noisy and classes thinned out in training alone; what is held out for evaluation is taken first.
    """
    try:
        return _open_data(args, channels, needs_counts)
    except ValueError as error:  # labels out of range, superclasses that are not known
        raise DataError(f"{name_of(args)}: {error}") from error


def _open_data(args: Namespace, channels: int, needs_counts: bool) -> Data:
    train = open_split(args, args.train_split, training=True, channels=channels)
    fraction = held_out_fraction(args)
    harder = args.label_noise or args.long_tail or args.subset != 1.0 or fraction
    data = Data(train, num_classes=number_of_classes(train))
    if args.val_split and not fraction:
        data.validation = open_split(args, args.val_split, training=False, channels=channels)
    if harder and not is_indexed(train):
        raise DataError(_STREAM.format(args.dataset))
    if is_indexed(train):
        if len(train) == 0:
            raise DataError(f"the training split {args.train_split!r} of {name_of(args)} is empty")
        if harder:
            twin = open_split(args, args.train_split, training=True, channels=channels) if fraction else None
            _harden(args, data, train, twin, fraction)
        else:
            labels = labels_of(train) if needs_counts else kept_labels_of(train)
            data.counts = None if labels is None else _counts(args, data, labels)
    return data


def open_split(args: Namespace, split: str, *, training: bool, channels: int = 3) -> Any:
    """One split, as timm or a registered factory makes it; its transform is set later."""
    check_split(args, split)
    try:
        if args.dataset.startswith(PREFIX):
            return registry.datasets.create(args.dataset.removeprefix(PREFIX), split=split, **args.dataset_opt)
        dataset = create_dataset(
            args.dataset,
            root=args.data_dir,
            split=split,
            is_training=training,
            class_map=args.class_map,
            download=args.dataset_download,
            batch_size=args.batch_size,
            seed=args.seed,
            repeats=args.epoch_repeats if training else 0,
            input_img_mode=args.input_img_mode or ("RGB" if channels == 3 else "L"),
            input_key=args.input_key,
            target_key=args.target_key,
            num_samples=args.train_num_samples if training else args.val_num_samples,
            trust_remote_code=args.dataset_trust_remote_code,
        )
        return WatchedImages(dataset, strict=args.strict_data) if isinstance(dataset, ImageDataset) else dataset
    except (OSError, RuntimeError, TypeError, ValueError, AssertionError, ImportError) as error:
        raise DataError(f"cannot open split {split!r} of {name_of(args)}: {error}") from error


def number_of_classes(dataset: Any) -> int | None:
    names = class_names_of(dataset)
    return len(names) if names else None


def name_of(args: Namespace) -> str:
    return " in ".join(filter(None, [args.dataset or "image folder", repr(args.data_dir) if args.data_dir else ""]))


def _counts(args: Namespace, data: Data, labels: Labels) -> list[int]:
    return class_counts(labels, args.num_classes or data.num_classes or int(labels.max()) + 1)


def _harden(args: Namespace, data: Data, train: Any, twin: Any, fraction: float | None) -> None:
    labels = labels_of(train)
    counts = _counts(args, data, labels)
    indices = None
    if fraction:
        indices, held = hold_out(labels, counts, fraction, seed=args.seed)
        # a second copy of the split: evaluation has a transform of its own
        data.validation = Selection(twin, held, labels)
        data.notes.append(f"held out {len(held)} training images, {fraction:g} of each class, for evaluation")
    kept = labels if indices is None else labels[indices]
    chosen = pick(kept, _kept_counts(args, class_counts(kept, len(counts)), data.notes), seed=args.seed)
    indices = chosen if indices is None else indices[chosen]
    noisy = None
    if args.label_noise:
        noisy = noisy_labels(labels, superclasses_of(train, args.superclasses), args.label_noise, seed=args.seed)
        changed = int((noisy[indices] != labels[indices]).sum())
        data.notes.append(f"label noise {args.label_noise:g}: {changed} of {len(indices)} training labels differ")
    data.train = Selection(train, indices, labels, noisy)
    data.counts = class_counts(data.train.targets, len(counts))


def _kept_counts(args: Namespace, counts: Sequence[int], notes: list[str]) -> list[int]:
    kept = list(counts)
    if args.subset != 1.0:
        kept = fraction_counts(kept, args.subset)
        notes.append(f"subset {args.subset:g}: {sum(kept)} of {sum(counts)} training images")
    if args.long_tail:
        kept = long_tail_counts(kept, args.long_tail, args.imbalance_factor)
        notes.append(f"long tail ({args.long_tail}): {max(kept)} to {min(kept)} images a class, {sum(kept)} in all")
    return kept
