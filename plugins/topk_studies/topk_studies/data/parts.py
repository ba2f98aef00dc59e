"""The three parts of the data of a comparison: images for training, for tuning, and for the results."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from topk_registry.data import Selection, hold_out, is_indexed, open_dataset
from topk_registry.data.folders import split_folder
from topk_registry.data.open import FOLDERS
from topk_studies.data.cifar100 import CLASSES, SUPERCLASSES


def parts(
    split: str = "train",
    root: str | Path | None = None,
    *,
    of: str = "",
    train_split: str = "train",
    val_split: str | float = "validation",
    test_split: str = "",
    image_mode: str = "RGB",
    options: Mapping[str, Any] | None = None,
    reader_options: Mapping[str, Any] | None = None,
) -> Selection:
    """Open one of the three parts of a data set for a comparison.

    No parameter has the name of a parameter of ``open_dataset``, because ``open_dataset`` passes only other options on.

    A part of CIFAR-100 has the attribute ``superclasses``: a list with the index of the superclass of each class.

    Args:
        split: part to open, ``"train"``, ``"validation"`` or ``"test"``.
        root: folder of the data.
        of: name of the data set, as in ``timm train --dataset``.
        train_split: split of the data set for training.
        val_split: split of the data set for validation, or the fraction of each training class that is held out for
            validation.
        test_split: split of the data set for testing. If empty, the images of ``val_split`` are divided: one half of
            each class is for validation and the other half is for testing.
        image_mode: Pillow mode to which images from files are converted.
        options: options of the data set.
        reader_options: further arguments of ``timm.data.create_dataset``.

    Raises:
        ValueError, OSError, TypeError: the data cannot be opened.

    Example:
        >>> sizes = {"of": "topk/hierarchy", "options": {"size": 500}}
        >>> [len(parts(split, **sizes)) for split in ("train", "validation", "test")]
        [500, 250, 250]
    """

    def opened(name: str) -> Any:
        if of in FOLDERS and Path(root or "").is_dir() and split_folder(root or "", name) is None and not fraction:
            raise ValueError(f"{root} has no folder {name!r}")
        more: dict[str, Any] = {} if of.startswith("topk/") and of not in FOLDERS else {"timm_options": reader_options}
        dataset = open_dataset(of, name, root, training=False, mode=image_mode, **more, **(options or {}))
        if not is_indexed(dataset):
            raise ValueError(f"{of} is a stream, and a comparison needs random access")
        if dataset.classes == CLASSES:
            dataset.superclasses = SUPERCLASSES
        return dataset

    if split not in ("train", "validation", "test"):
        raise ValueError(f"split must be one of train, validation, test, got {split!r}")
    fraction = 0.0
    with suppress(ValueError):
        fraction = float(val_split)
    if split == "test" and test_split:
        return opened(test_split)
    if split == "train":
        return hold_out(opened(train_split), fraction)[0] if fraction else opened(train_split)
    held = hold_out(opened(train_split), fraction)[1] if fraction else opened(str(val_split))
    return held if test_split else hold_out(held, 0.5)[split == "validation"]
