"""Labels, class names and superclasses of any map-style data set, without decoding its images if possible.

The target of an image with several labels is k-hot: a vector [n] with 1 for each of its labels, and 0 elsewhere.
"""

import json
from collections.abc import Sequence, Sized
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from topk_registry.data.cifar100 import CLASSES, SUPERCLASSES

Labels = NDArray[np.int64]
KHot = NDArray[np.float32]

MULTILABEL = "each image has several labels: use --task multilabel"


def labels_of(dataset: Any) -> Labels:
    """Return the label of every sample [N]; a data set without a list of labels is read once."""
    kept = kept_labels_of(dataset)
    return _one_label_each(_targets(dataset)) if kept is None else kept


def k_hot_of(dataset: Any) -> KHot:
    """Return the k-hot target of every sample [N, n]; a data set without a list of targets is read once."""
    kept = kept_k_hot_of(dataset)
    return np.stack([np.asarray(target, np.float32) for target in _targets(dataset)]) if kept is None else kept


def kept_labels_of(dataset: Any) -> Labels | None:
    """Return the label of every sample [N] if the data set stores the labels apart from its images, else None.

    torchvision's data sets do (``targets``, ``labels``), and timm's readers of folders and of Hugging Face data sets.
    """
    for name in ("targets", "labels"):
        kept = getattr(dataset, name, None)
        if kept is not None and not callable(kept):
            return _one_label_each(kept)
    reader = getattr(dataset, "reader", dataset)
    if hasattr(reader, "samples"):
        return _one_label_each([target for _, target in reader.samples])
    return _one_label_each(list(reader.iter_targets())) if hasattr(reader, "iter_targets") else None


def kept_k_hot_of(dataset: Any) -> KHot | None:
    """Return the k-hot target of every sample [N, n] if the data set stores them apart from its images, else None."""
    kept = getattr(dataset, "targets", None)
    if kept is not None and not callable(kept):
        k_hot = np.asarray(kept, np.float32)
        if k_hot.ndim != 2:
            raise ValueError(f"expected k-hot targets [N, n] for --task multilabel, got {list(k_hot.shape)}")
        return k_hot
    encode: Any = getattr(dataset, "target_transform", None)
    reader: Any = getattr(dataset, "reader", None)
    if encode is not None and hasattr(reader, "iter_targets"):
        return np.stack([np.asarray(encode(target), np.float32) for target in reader.iter_targets()])
    return None


def class_names_of(dataset: Any) -> list[str] | None:
    """Return the class names in order, or None if the data set has none."""
    if getattr(dataset, "classes", None) is not None:
        return [str(name) for name in dataset.classes]
    reader = getattr(dataset, "reader", dataset)
    index = getattr(reader, "class_to_idx", None) or getattr(reader, "class_name_to_idx", None)
    if not index:
        return None
    names: dict[int, list[str]] = {}
    for name, number in index.items():
        names.setdefault(int(number), []).append(str(name))
    return ["/".join(names.get(number, [str(number)])) for number in range(max(names) + 1)]


def is_indexed(dataset: object) -> bool:
    """Return whether samples have an index; streams have none."""
    return hasattr(dataset, "__getitem__") and isinstance(dataset, Sized) and not hasattr(dataset, "__iter__")


def class_counts(labels: Labels, num_classes: int) -> list[int]:
    """Count the samples of each class [num_classes]; a label out of range is a ValueError."""
    if len(labels) and not (labels.min() >= 0 and labels.max() < num_classes):
        wrong = labels.min() if labels.min() < 0 else labels.max()
        raise ValueError(f"expected labels in [0, {num_classes - 1}], got {wrong}; see --num-classes")
    return np.bincount(labels, minlength=num_classes).tolist()


def superclasses_of(dataset: Any, file: str | Path | None = None) -> list[int] | None:
    """Return the superclass of every class [n], or None if it is unknown.

    Args:
        dataset: with an attribute ``superclasses``, or the classes of CIFAR-100.
        file: JSON; a list with the superclass of each class in order, or an object from class name to superclass.
    """
    classes = class_names_of(dataset)
    if file:
        return _numbered(_read(Path(file), classes))
    known = getattr(dataset, "superclasses", None)
    if known is not None:
        return _numbered(known)
    return SUPERCLASSES if classes == CLASSES else None


def _read(file: Path, classes: Sequence[str] | None) -> Sequence[object]:
    content = json.loads(file.read_text(encoding="utf-8"))
    if isinstance(content, dict) and classes is not None:
        if missing := [name for name in classes if name not in content]:
            raise ValueError(f"{file} has no superclass for {len(missing)} classes, the first is {missing[0]!r}")
        return [content[name] for name in classes]
    if not isinstance(content, list) or (classes is not None and len(content) != len(classes)):
        raise ValueError(f"{file}: expected a JSON list with the superclass of each class, or an object by class name")
    return content


def _numbered(superclasses: Sequence[object]) -> list[int]:
    number = {name: i for i, name in enumerate(dict.fromkeys(superclasses))}
    return [number[name] for name in superclasses]


def _one_label_each(kept: Any) -> Labels:
    if len(kept) and np.ndim(kept[0]):
        raise ValueError(MULTILABEL)
    return np.asarray(kept, np.int64)


def _targets(dataset: Any) -> list[Any]:
    transform, dataset.transform = getattr(dataset, "transform", None), None
    try:
        return [dataset[i][1] for i in range(len(dataset))]
    finally:
        dataset.transform = transform
