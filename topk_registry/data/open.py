"""Open a data set by name, optionally with label noise, a long tail or a subset."""

import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from topk_registry import registry
from topk_registry.data import selection
from topk_registry.data.folders import IMAGE_SUFFIXES, TRAINING, read_folders, split_folder
from topk_registry.data.labels import MULTILABEL, class_names_of, is_indexed
from topk_registry.data.selection import Selection, UnreadableImageError
from topk_registry.registry.options import accepts, check_options, parameters

PREFIX = "topk/"
FOLDERS = ("", "folder", "topk/folder")
# exceptions of Pillow for broken files
DECODE_ERRORS = (OSError, EOFError, SyntaxError, ValueError, struct.error, zlib.error, Image.DecompressionBombError)

# options of every data set, with their defaults
CHANGES = {"noise": 0.0, "noise_kind": "", "long_tail": 1.0, "subset": 1.0, "change_seed": 0}


def open_dataset(
    name: str,
    split: str = "train",
    root: str | Path | None = None,
    *,
    training: bool | None = None,
    held_out: float = 0.0,
    multilabel: bool = False,
    mode: str = "RGB",
    suffixes: tuple[str, ...] = IMAGE_SUFFIXES,
    timm_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Open one split of a data set by a name of ``timm train --dataset``.

    Args:
        name: ``topk/NAME`` for a registered data set; ``topk/folder`` or an empty string for a folder with one
            subfolder per class; or a name of timm such as ``torch/cifar100`` or ``hfds/USER/NAME``.
        split: name of the split. If ``root`` has no subfolder of this name, ``root`` itself is the split.
        root: data directory.
        training: whether to open the training part. Default: True if the split is named ``train``.
        held_out: fraction of each class of the split that is held out. The training part excludes these samples. The
            evaluation part consists of these samples, with true labels.
        multilabel: whether images have several labels.
        mode: Pillow mode to which images from files are converted.
        suffixes: suffixes of image files in folders.
        timm_options: further arguments of ``timm.data.create_dataset``.
        options: options of a registered data set. All data sets also take options that change only the training part:
            ``noise``, share of wrong labels; ``noise_kind``, ``family`` (within superclasses) or ``uniform``;
            ``long_tail``, ratio of the frequencies of the first and the last class; ``subset``, fraction of each
            class; ``change_seed``, seed of these changes (default: ``seed`` of a registered data set, else 0).

    Raises:
        ValueError, OSError, TypeError: the data cannot be opened, or an option is invalid.

    Example:
        >>> train = open_dataset("topk/hierarchy", size=200, noise=0.4)
        >>> train[0][1], train.notes
        (0, ['label noise 0.4 (family): 51 of 200 training labels differ'])
    """
    if name.startswith(PREFIX) and name not in FOLDERS:
        dataset, changes = _open_registered(name, split, root, options)
        if problem := first_problem(dataset, multilabel=multilabel):
            raise ValueError(f"{name}: {problem}")
    else:
        changes = options
        if wrong := [option for option in options if option not in CHANGES]:
            raise TypeError(f"data set {name or 'folder'!r} has no option {wrong[0]!r}: it has {', '.join(CHANGES)}")
        if name not in FOLDERS:
            dataset = _open_timm(name, split, root, mode, dict(timm_options or {}))
        elif multilabel:
            raise ValueError("a folder has one label per image: use a data set with several for --task multilabel")
        else:
            dataset = _open_folder(split, Path(root or ""), mode, suffixes)
    if not is_indexed(dataset):
        if changes or held_out:
            used = ", ".join([*changes, *["held_out"] * bool(held_out)])
            raise ValueError(f"{name} is a stream, which has no random access, as {used} would need")
        return dataset
    if len(dataset) == 0:
        raise ValueError(f"split {split!r} of {name or root} is empty")
    part = Selection(dataset)
    training = split in TRAINING if training is None else training
    if held_out:
        rest, held = selection.hold_out(part, held_out, seed=changes.get("change_seed", 0))
        part = rest if training else held
    return _changed(part, **{**CHANGES, **changes}) if training else part


def _open_registered(name: str, split: str, root: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return a registered data set, and the options that this data set does not take."""
    factory = registry.datasets.builder(short := name.removeprefix(PREFIX))
    named = parameters(factory)[0]
    own = {option: value for option, value in options.items() if option in named or option not in CHANGES}
    changes = {option: value for option, value in options.items() if option not in own}
    check_options(f"dataset {name!r}", factory, ["split", *own], also=CHANGES)
    if isinstance(own.get("seed"), int):
        changes.setdefault("change_seed", own["seed"])
    if root is not None and accepts(factory, "root"):
        own.setdefault("root", root)
    return registry.datasets.create(short, factory, split=split, **own), changes


def _open_folder(split: str, root: Path, mode: str, suffixes: tuple[str, ...]) -> "ReaderImages":
    if not root.is_dir():
        raise FileNotFoundError(f"the data directory {root} does not exist")
    return ReaderImages(FolderReader(split_folder(root, split) or root, suffixes), mode)


def _open_timm(name: str, split: str, root: Any, mode: str, options: dict[str, Any]) -> Any:
    from timm.data import ImageDataset, create_dataset

    encode = options.pop("target_transform", None)
    place = None if root is None else str(root)
    dataset: Any = create_dataset(name, root=place, split=split, input_img_mode=mode, **options)
    if isinstance(dataset, ImageDataset):  # ReaderImages names unreadable images and stores labels
        return ReaderImages(dataset.reader, mode, encode)
    if encode is not None:
        dataset.target_transform = encode
    return dataset


def _changed(
    data: Selection, noise: float, noise_kind: str, long_tail: float, subset: float, change_seed: int
) -> Selection:
    if subset != 1.0:
        data = selection.subset(data, subset, seed=change_seed)
    if long_tail != 1.0:
        data = selection.long_tail(data, long_tail, seed=change_seed)
    return selection.with_label_noise(data, noise, kind=noise_kind, seed=change_seed) if noise else data


def first_problem(dataset: Any, *, multilabel: bool = False) -> str:
    """Check a registered data set by its first sample. Return the problem as text, or an empty string.

    A data set has a length. ``dataset[i]`` is a pair of a PIL image and a label from 0 to n - 1, or, with several
    labels per image, a floating-point vector [n]. ``dataset.transform`` can be set and is applied to the image.
    ``dataset.classes`` are the class names.
    """
    if not is_indexed(dataset):
        return "" if hasattr(dataset, "__iter__") else f"expected a data set with a length, got {dataset!r}"
    if len(dataset) == 0:
        return ""
    sample, names = dataset[0], class_names_of(dataset)
    if not (isinstance(sample, tuple) and len(sample) == 2 and isinstance(sample[0], Image.Image)):
        return f"expected samples (PIL image, label) without a transform, got {sample!r}"
    if not hasattr(dataset, "transform"):
        return "expected an attribute transform, None at first, which is applied to each image"
    target, n = np.asarray(sample[1]), len(names or ())
    if multilabel:
        fine = target.ndim == 1 and (not n or len(target) == n)
        return "" if fine else f"expected targets [{n or 'n'}] with 1 for each label, got {target.shape}"
    if target.ndim:
        return MULTILABEL
    fine = np.issubdtype(target.dtype, np.integer) and target >= 0 and (not n or target < n)
    return "" if fine else f"expected whole labels from 0 to {n - 1 if n else 'n - 1'}, got {sample[1]!r}"


class FolderReader:
    """Files and labels of a folder with one subfolder per class, with the interface of timm readers."""

    def __init__(self, root: Path, suffixes: tuple[str, ...]) -> None:
        folders = read_folders(root, suffixes)
        self.notes = folders.notes
        self.class_to_idx = {name: i for i, name in enumerate(folders.names)}
        self.samples = [(path, self.class_to_idx[name]) for path, name in folders.images]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self.samples[index]
        return open(path, "rb"), label

    def filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        return self.samples[index][0]


class ReaderImages:
    """Pairs (image, target) from a :class:`FolderReader` or a reader of timm, with images in one Pillow mode.

    An image that cannot be read raises ``UnreadableImageError``.
    """

    def __init__(self, reader: Any, mode: str, target_transform: Callable[[Any], Any] | None = None) -> None:
        self.reader, self.mode, self.target_transform = reader, mode, target_transform
        self.transform: Any = None
        self.notes: list[str] = list(getattr(reader, "notes", ()))

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        file, target = self.reader[index]
        try:
            with file, Image.open(file) as opened:
                check_depth(opened)
                image = opened.convert(self.mode)
        except DECODE_ERRORS as error:
            raise UnreadableImageError(f"cannot read {self._name(index)}: {error}") from error
        if self.target_transform is not None:
            target = self.target_transform(target)
        return (image if self.transform is None else self.transform(image)), -1 if target is None else target

    def _name(self, index: int) -> str:
        try:
            return str(self.reader.filename(index, absolute=True) or f"sample {index}")
        except NotImplementedError:  # readers of tables have no file names
            return f"sample {index}"


def check_depth(image: Image.Image) -> None:
    """Raise ValueError for 16-bit and floating-point images, because Pillow would clip values outside of 0 to 255."""
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        extrema: Any = image.getextrema()
        low, high = extrema
        if low < 0 or high > 255 or (image.mode == "F" and high <= 1 and low != high):
            raise ValueError(f"values from {low:g} to {high:g} (mode {image.mode}) need a conversion to 8 bits")
