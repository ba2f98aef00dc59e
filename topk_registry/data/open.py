"""Open a data set by name, with label noise, a long tail or a subset as options."""

import operator
from collections.abc import Mapping
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from topk_registry import registry
from topk_registry.data.folders import IMAGE_SUFFIXES, TRAINING, split_folder
from topk_registry.data.images import FolderReader, ReaderImages
from topk_registry.data.label_noise import with_label_noise
from topk_registry.data.labels import MULTILABEL, class_names_of, is_indexed, superclasses_of
from topk_registry.data.selection import Selection, hold_out, long_tail, subset
from topk_registry.registry.options import accepts, check_options

PREFIX = "topk/"
FOLDERS = ("", "folder", "topk/folder")
STREAMS = ("hfids/", "tfds/", "wds/")

# options of every data set, for its training part only
CHANGES = {
    "noise": "share of wrong labels, in [0, 1]",
    "noise_kind": "family (within superclasses) or uniform",
    "superclasses_file": "JSON: the superclass of each class",
    "long_tail": "how many times the first class is as frequent as the last",
    "profile": "of the long tail: exp or pareto",
    "subset": "fraction of each class",
    "change_seed": "of noise, long tail and subset",
}


def open_dataset(
    name: str,
    split: str = "train",
    root: str | Path | None = None,
    *,
    training: bool | None = None,
    held_out: float = 0.0,
    fold: int = 0,
    strict: bool = False,
    multilabel: bool = False,
    mode: str = "RGB",
    suffixes: tuple[str, ...] = IMAGE_SUFFIXES,
    flat: bool = False,
    timm_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Open one split of a data set by the name that ``timm train --dataset`` takes.

    Args:
        name: ``topk/NAME`` for a registered data set, ``topk/folder`` or nothing for a folder with one folder per
            class, or a name of timm's such as ``torch/cifar100`` and ``hfds/USER/NAME``.
        split: name of the split; below a folder, the folder of this name or the folder itself.
        root: the data directory.
        training: whether this is the part to train on, by default if the split is called so. The options ``noise``,
            ``long_tail`` and ``subset`` change only this part.
        held_out: a fraction of each class of the split that is held out for evaluation: the part to train on lacks it,
            the part to evaluate on is it, with true labels.
        fold: which part is held out.
        strict: an unreadable image is an error; by default the next image replaces it.
        multilabel: whether images have several labels.
        mode: of Pillow, that images of files are converted to.
        suffixes: endings of images in folders.
        flat: accept a folder without class folders.
        timm_options: further arguments of ``timm.data.create_dataset``.
        options: those of :data:`CHANGES`, and those of the data set itself. ``seed`` of a registered data set is also
            the seed of changes, unless ``change_seed`` is given.

    Raises:
        ValueError, OSError, TypeError: the data cannot be opened, or an option is wrong; the message says why.

    Example:
        >>> train = open_dataset("topk/hierarchy", size=200, noise=0.4)
        >>> train[0][1], train.notes
        (0, ['label noise 0.4 (family): 51 of 200 training labels differ'])
    """
    changes, own = _divide(name, options)
    if name in FOLDERS:
        dataset = _open_folder(Path(root or ""), split, mode, suffixes, flat=flat, multilabel=multilabel)
    elif name.startswith(PREFIX):
        if root is not None and accepts(registry.datasets.builder(name.removeprefix(PREFIX)), "root"):
            own.setdefault("root", root)
        dataset = registry.datasets.create(name.removeprefix(PREFIX), split=split, **own)
        if problem := first_problem(dataset, multilabel=multilabel):
            raise ValueError(f"{name}: {problem}")
    else:
        dataset = _open_timm(name, split, root, mode, dict(timm_options or {}))
    if not is_indexed(dataset):
        if changes or held_out:
            used = ", ".join([*changes, *["held_out"] * bool(held_out)])
            raise ValueError(f"{name} is a stream, which has no random access, as {used} would need")
        return dataset
    selection = Selection(dataset)
    selection.strict = strict
    if len(selection) == 0:
        raise ValueError(f"split {split!r} of {name or root} is empty")
    training = split in TRAINING if training is None else training
    if held_out:
        rest, held = hold_out(selection, held_out, fold=fold, seed=changes.get("change_seed", 0))
        selection = rest if training else held
    return _changed(selection, **changes) if training else selection


def first_problem(dataset: Any, *, multilabel: bool = False) -> str:
    """Return what is wrong with a registered data set by its first sample, or nothing.

    A data set has a length, ``dataset[i]`` is a pair of a PIL image and a label from 0 to n - 1 (or, with several
    labels per image, a floating-point vector [n]), ``dataset.transform`` can be set and is applied to the image, and
    ``dataset.classes`` names the classes.
    """
    if not is_indexed(dataset):
        return "" if hasattr(dataset, "__iter__") else f"expected a data set with a length, got {dataset!r}"
    if len(dataset) == 0:
        return ""
    sample, names = dataset[0], class_names_of(dataset)
    if not isinstance(sample, tuple) or len(sample) != 2:
        return f"expected samples (image, label), got {type(sample).__name__}"
    image, target = sample
    if not isinstance(image, Image.Image):
        return f"expected a PIL image without a transform, got {type(image).__name__}"
    if not hasattr(dataset, "transform"):
        return "expected an attribute transform, None at first, which is applied to each image"
    if multilabel or np.ndim(target):
        if not multilabel:
            return MULTILABEL
        if np.ndim(target) != 1 or (names and len(target) != len(names)):
            return f"expected targets [{len(names) if names else 'n'}] with 1 for each label, got {np.shape(target)}"
        return ""
    try:
        number = operator.index(target)
    except TypeError:
        return f"expected a label that is a whole number, got {target!r}"
    inside = number >= 0 and (not names or number < len(names))
    return "" if inside else f"expected labels from 0 to {len(names) - 1 if names else 'n - 1'}, got {number}"


def _divide(name: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split options into changes and those of the data set itself, whose factory may name any of its own."""
    factory: Any = dict  # folders and timm's data sets take none
    named: set[str] = set()
    if name.startswith(PREFIX) and name not in FOLDERS:
        factory = registry.datasets.builder(name.removeprefix(PREFIX))
        named = {p.name for p in signature(factory).parameters.values() if p.kind is not Parameter.VAR_KEYWORD}
    own = {option: value for option, value in options.items() if option in named or option not in CHANGES}
    changes = {option: value for option, value in options.items() if option not in own}
    if factory is dict and own:
        raise TypeError(f"data set {name or 'folder'!r} has no option {next(iter(own))!r}: it has {', '.join(CHANGES)}")
    if factory is not dict:
        check_options(f"dataset {name!r}", factory, ["split", *own], also=CHANGES)
    if isinstance(own.get("seed"), int):
        changes.setdefault("change_seed", own["seed"])
    return changes, own


def _changed(
    dataset: Selection,
    *,
    noise: float = 0.0,
    noise_kind: str = "",
    superclasses_file: str = "",
    long_tail: float = 1.0,
    profile: str = "exp",
    subset: float = 1.0,
    change_seed: int = 0,
) -> Selection:
    if subset != 1.0:
        dataset = _subset(dataset, subset, seed=change_seed)
    if long_tail != 1.0:
        dataset = _long_tail(dataset, long_tail, profile=profile, seed=change_seed)
    if noise:
        families = superclasses_of(dataset, superclasses_file) if superclasses_file else None
        dataset = with_label_noise(dataset, noise, kind=noise_kind, superclasses=families, seed=change_seed)
    return dataset


_subset, _long_tail = subset, long_tail


def _open_folder(
    root: Path, split: str, mode: str, suffixes: tuple[str, ...], *, flat: bool, multilabel: bool
) -> ReaderImages:
    if multilabel:
        raise ValueError("a folder has one label per image: use a data set with several for --task multilabel")
    if not root.is_dir():
        raise FileNotFoundError(f"the data directory {str(root)!r} does not exist")
    return ReaderImages(FolderReader(split_folder(root, split) or root, suffixes, flat=flat), mode=mode)


def _open_timm(name: str, split: str, root: str | Path | None, mode: str, options: dict[str, Any]) -> Any:
    from timm.data import ImageDataset, create_dataset

    encode = options.pop("target_transform", None)
    dataset: Any = create_dataset(
        name, root=None if root is None else str(root), split=split, input_img_mode=mode, **options
    )
    if isinstance(dataset, ImageDataset):  # ours reports unreadable images, and keeps their labels apart
        return ReaderImages(dataset.reader, mode=mode, target_transform=encode)
    if encode is not None:
        dataset.target_transform = encode
    return dataset
