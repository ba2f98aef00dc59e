"""Functions that open a data set by its name, and classes that read image files."""

import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
from PIL import Image

from topk_registry import registry
from topk_registry.data import selection
from topk_registry.data.folders import IMAGE_SUFFIXES, TRAINING, folder_of, read_folders
from topk_registry.data.labels import MULTILABEL, class_names_of, is_indexed, targets_of
from topk_registry.data.selection import Selection
from topk_registry.errors import UnreadableImageError
from topk_registry.registry.signatures import accepts, check_options, parameters

PREFIX = "topk/"
FOLDERS = ("", "folder", "topk/folder")
# exceptions that Pillow raises for broken files
DECODE_ERRORS = (OSError, EOFError, SyntaxError, ValueError, struct.error, zlib.error, Image.DecompressionBombError)


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
    """Open one split of a data set by name. ``timm train --dataset`` takes the same names.

    Args:
        name: ``"topk/NAME"`` selects a registered data set. ``"topk/folder"`` or ``""`` selects a folder with one
            subfolder per class. Any other name is a name of timm, such as ``"torch/cifar100"``.
        split: name of the split. If the folder ``root`` has no subfolder for any split, ``root`` is the split.
        root: directory of the data. If a registered data set takes no directory, a ``root`` raises an error.
        training: whether the result is for training. Default: True if the split is ``"train"`` or ``"training"``.
        held_out: fraction of each class to hold out, or 0. If the result is for training, the held-out samples are
            left out. Otherwise, the result contains only the held-out samples, with labels without label noise.
        multilabel: whether an image can have several labels.
        mode: mode of Pillow, such as ``"RGB"``, to which images from files are converted.
        suffixes: suffixes of the image files in a folder.
        timm_options: further arguments of ``timm.data.create_dataset``, for a name of timm.
        options: options of a registered data set, such as ``size``. In addition, every data set takes the following
            options. These options have an effect only if the result is for training.

            - ``noise``: share of the labels that are replaced by random labels (default 0). With the kind
              ``"family"``, the new label can equal the old label. See :func:`with_label_noise`.
            - ``noise_kind``: ``"family"`` or ``"uniform"``, see :func:`with_label_noise`
            - ``long_tail``: ratio of the sizes of the first class and the last class (default 1)
            - ``subset``: fraction of each class that is kept (default 1)
            - ``change_seed``: seed of these changes. Default: option ``seed`` of a registered data set, else 0

    Returns:
        A :class:`Selection`, or a data set of timm without random access (a stream). For training, the next image
        replaces an image that cannot be read. Otherwise, the target of such a sample is -100, which metrics ignore.

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
        check_options(f"data set {name or 'folder'!r}", _changed, changes := options)
        if name not in FOLDERS:
            dataset = _open_timm(name, split, root, mode, timm_options or {})
        elif multilabel:
            raise ValueError("a folder has one label per image, but --task multilabel needs several labels per image")
        else:
            dataset = ReaderImages(FolderReader(Path(root or ""), split, suffixes), mode)
    if not is_indexed(dataset):
        if changes or held_out:
            raise ValueError(f"{name} is a stream, but {', '.join(changes) or 'held_out'} needs random access")
        return dataset
    if len(dataset) == 0:
        raise ValueError(f"split {split!r} of {name or root} is empty")
    part = Selection(dataset)
    training = split in TRAINING if training is None else training
    if held_out:
        part = selection.hold_out(part, held_out, seed=changes.get("change_seed", 0))[0 if training else 1]
    part.substitutes = training
    return _changed(part, **changes) if training else part


def _open_registered(name: str, split: str, root: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Create a registered data set. Return the data set, and the ``options`` for later changes, such as noise."""
    factory = registry.datasets.builder(short := name.removeprefix(PREFIX))
    named = parameters(factory)[0]
    own = {option: value for option, value in options.items() if option in named or option not in CHANGES}
    changes = {option: value for option, value in options.items() if option not in own}
    check_options(f"dataset {name!r}", factory, ["split", *own], also=CHANGES)
    if isinstance(own.get("seed"), int):
        changes.setdefault("change_seed", own["seed"])
    if root:
        if not accepts(factory, "root"):
            raise ValueError(f"{name} takes no directory, got {str(root)!r}; topk/folder reads a folder of images")
        own.setdefault("root", root)
    return registry.datasets.create(short, factory, split=split, **own), changes


def _open_timm(name: str, split: str, root: Any, mode: str, options: Mapping[str, Any]) -> Any:
    from timm.data import ImageDataset, create_dataset

    dataset: Any = create_dataset(name, root=root and str(root), split=split, input_img_mode=mode, **options)
    if isinstance(dataset, ImageDataset):  # the messages of ReaderImages name the unreadable file
        return ReaderImages(dataset.reader, mode, dataset.target_transform)
    return dataset


def _changed(
    data: Selection,
    /,
    *,
    noise: float = 0.0,
    noise_kind: str = "",
    long_tail: float = 1.0,
    subset: float = 1.0,
    change_seed: int = 0,
) -> Selection:
    if subset != 1.0:
        data = selection.subset(data, subset, seed=change_seed)
    if long_tail != 1.0:
        data = selection.long_tail(data, long_tail, seed=change_seed)
    return selection.with_label_noise(data, noise, kind=noise_kind, seed=change_seed) if noise else data


CHANGES = tuple(parameters(_changed)[0])  # the options that every data set takes


def first_problem(dataset: Any, *, multilabel: bool = False) -> str:
    """Check the first sample of a registered data set. Return a text that describes the problem, or an empty string."""
    if not is_indexed(dataset):
        return "" if hasattr(dataset, "__iter__") else f"expected a data set with a length, got {dataset!r}"
    if len(dataset) == 0:
        return ""
    images: list[Any] = []
    dataset.transform = lambda image: images.append(image) or image
    sample, dataset.transform = dataset[0], None
    if not (isinstance(sample, tuple) and len(sample) == 2 and isinstance(sample[0], Image.Image)):
        return f"expected samples (PIL image, label), got {sample!r}"
    if not images:
        return "expected dataset[i] to apply the attribute transform to the image"
    names, kept = class_names_of(dataset), targets_of(dataset)
    if kept is not None and len(kept) != len(dataset):
        return f"expected one entry of targets per sample, got {len(kept)} targets and {len(dataset)} samples"
    target, n = np.asarray(sample[1]), len(names or ())
    if multilabel:
        fine = target.ndim == 1 and (not n or len(target) == n)
        return "" if fine else f"expected targets [{n or 'n'}] with 1 for each label, got {target.shape}"
    if target.ndim:
        return MULTILABEL
    if kept is not None and kept[0] != target:
        return f"expected targets[0] to be the label of dataset[0], got {kept[0]} and {target}"
    fine = np.issubdtype(target.dtype, np.integer) and target >= 0 and (not n or target < n)
    return "" if fine else f"expected whole labels from 0 to {n - 1 if n else 'n - 1'}, got {sample[1]!r}"


class FolderReader:
    """The image files of one split of a folder, as a timm reader: ``reader[i]`` is (open file, class index)."""

    def __init__(self, root: Path, split: str, suffixes: tuple[str, ...]) -> None:
        if not root.is_dir():
            raise FileNotFoundError(f"the data directory {root} does not exist")
        folders = read_folders(folder_of(root, split), suffixes)
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
    """A data set of pairs (image, target) from the files of a reader: a :class:`FolderReader` or a reader of timm.

    All images are converted to the Pillow mode ``mode``. If an image cannot be read, ``dataset[i]`` raises
    ``UnreadableImageError``. If the reader has no label for a sample, the target is -1.
    """

    def __init__(self, reader: Any, mode: str, target_transform: Callable[[Any], Any] | None = None) -> None:
        self.reader, self.mode, self.target_transform = reader, mode, target_transform
        self.transform: Any = None
        self.notes: list[str] = list(getattr(reader, "notes", ()))

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        try:
            file, target = self.reader[index]
            with file, Image.open(file) as opened:
                check_depth(opened)
                image = opened.convert(self.mode)
        except DECODE_ERRORS as error:
            name = self.reader.filename(index, absolute=True) or f"sample {index}"
            raise UnreadableImageError(f"cannot read {name}: {error}") from error
        if self.target_transform is not None:
            target = self.target_transform(target)
        return (image if self.transform is None else self.transform(image)), -1 if target is None else target


def check_depth(image: Image.Image) -> None:
    """Raise ValueError if a 16-bit or floating-point image would lose information by a conversion to 8 bits.

    Pillow clips values below 0 and above 255, and converts every floating-point value from 0 to 1 to either 0 or 1.
    """
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        low, high = cast("tuple[float, float]", image.getextrema())
        if low < 0 or high > 255 or (image.mode == "F" and high <= 1 and low != high):
            raise ValueError(f"values from {low:g} to {high:g} (mode {image.mode}) need a conversion to 8 bits")
