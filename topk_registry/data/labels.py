"""The labels and the superclasses of any map-style data set, found without decoding its images.

The target of an image with several labels is k-hot: a vector [n] with 1 for each of its labels, and 0 elsewhere.
"""

import json
from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from topk_registry.data.cifar100 import CLASSES, SUPERCLASSES
from topk_registry.folders.trees import read_tree

Labels = NDArray[np.int64]
KHot = NDArray[np.float32]

SEVERAL = "each image has several labels: --task multilabel trains on them"


def labels_of(dataset: Any) -> Labels:
    """The label of every sample [N]; loads every sample of a data set that does not keep its labels apart."""
    labels = kept_labels_of(dataset)
    return _loaded_labels(dataset) if labels is None else labels


def kept_labels_of(dataset: Any) -> Labels | None:
    """The label of every sample [N], where the data set keeps them apart from its images.

    torchvision's data sets do (``targets``, ``labels``), and timm's image folders and Hugging Face readers.
    """
    for name in ("targets", "labels"):
        kept = getattr(dataset, name, None)
        if kept is not None and not callable(kept):
            return _one_label_each(kept)
    reader = getattr(dataset, "reader", dataset)
    if hasattr(reader, "samples"):
        return _one_label_each([target for _, target in reader.samples])
    if hasattr(reader, "iter_targets"):
        return _one_label_each(list(reader.iter_targets()))
    return None


def kept_k_hot_of(dataset: Any) -> KHot | None:
    """The k-hot target of every sample [N, n], where the data set keeps them apart from its images."""
    for holder in (dataset, getattr(dataset, "reader", None)):
        kept = getattr(holder, "targets", None)
        if kept is not None and not callable(kept):
            k_hot = np.asarray(kept, np.float32)
            if k_hot.ndim != 2:
                raise ValueError(f"--task multilabel needs targets [N, n], a row a sample, got {list(k_hot.shape)}")
            return k_hot
    reader, encode = getattr(dataset, "reader", dataset), getattr(dataset, "target_transform", None)
    if encode is not None and hasattr(reader, "iter_targets"):
        return np.stack([np.asarray(encode(target), np.float32) for target in reader.iter_targets()])
    return None


def k_hot_of(dataset: Any) -> KHot:
    """The k-hot target of every sample [N, n]; loads every sample of a data set that does not keep them apart."""
    kept = kept_k_hot_of(dataset)
    return np.stack([np.asarray(target, np.float32) for target in _loaded(dataset)]) if kept is None else kept


def _one_label_each(kept: Any) -> Labels:
    if len(kept) and np.ndim(kept[0]):
        raise ValueError(SEVERAL)
    return np.asarray(kept, np.int64)


def class_names_of(dataset: Any) -> list[str] | None:
    """The name of every class in order, where the data set tells."""
    if getattr(dataset, "classes", None) is not None:
        return [str(name) for name in dataset.classes]
    reader = getattr(dataset, "reader", dataset)
    index = getattr(reader, "class_to_idx", None) or getattr(reader, "class_name_to_idx", None)
    return _by_number(index) if index else None


def _by_number(index: Mapping[object, int]) -> list[str]:
    """Names in the order of their numbers; those of one number in one, and the number where it has none."""
    names: dict[int, list[str]] = {}
    for name, number in index.items():
        names.setdefault(int(number), []).append(str(name))
    return ["/".join(names.get(number, [str(number)])) for number in range(max(names) + 1)]


def is_indexed(dataset: object) -> bool:
    """Whether samples can be picked by index: streams cannot."""
    return hasattr(dataset, "__getitem__") and isinstance(dataset, Sized) and not hasattr(dataset, "__iter__")


def class_counts(labels: Labels, num_classes: int) -> list[int]:
    """Count the samples of each class [num_classes]; a label out of range is an error that names it."""
    if len(labels) and not (labels.min() >= 0 and labels.max() < num_classes):
        wrong = labels.min() if labels.min() < 0 else labels.max()
        raise ValueError(f"the data has label {wrong}, expected labels in [0, {num_classes - 1}]; see --num-classes")
    return np.bincount(labels, minlength=num_classes).tolist()


def superclasses_of(dataset: Any, file: str | Path | None = None) -> list[int]:
    """The superclass of every class [n]: from a file, from the data set itself, or CIFAR-100's published ones.

    A file is JSON: a list with the superclass of each class in order, or an object from class name to superclass. Or it
    is a tree of the classes in CSV (:func:`topk_registry.folders.trees.read_tree`), where parents are superclasses.
    """
    classes = class_names_of(dataset)
    if file:
        return _numbered(_read(Path(file), classes))
    if getattr(dataset, "superclasses", None) is not None:
        return _numbered(dataset.superclasses)
    if classes == CLASSES:
        return SUPERCLASSES
    raise ValueError(
        "this data set has no known superclasses: pass --superclasses FILE, a JSON list with the superclass of each "
        "class in order, a JSON object from class name to superclass, or a CSV file with the tree of the classes"
    )


def _read(file: Path, classes: Sequence[str] | None) -> list[object]:
    if file.suffix.lower() == ".csv":
        if classes is None:
            raise ValueError(
                f"{file} names classes, and this data set does not: pass a JSON list, one superclass a class"
            )
        tree = read_tree(file, classes)
        return [tree.names[parent] for parent in tree.parents[: len(classes)]]
    content = json.loads(file.read_text(encoding="utf-8"))
    if isinstance(content, list):
        return content
    if not isinstance(content, dict) or classes is None:
        raise ValueError(f"{file} must hold a list, one superclass a class (this data set does not name its classes)")
    missing = [name for name in classes if name not in content]
    if missing:
        raise ValueError(f"{file} has no superclass for {len(missing)} of the classes, the first is {missing[0]!r}")
    return [content[name] for name in classes]


def _numbered(superclasses: Sequence[object]) -> list[int]:
    number = {name: i for i, name in enumerate(dict.fromkeys(superclasses))}
    return [number[name] for name in superclasses]


def _loaded_labels(dataset: Any) -> Labels:
    return _one_label_each(_loaded(dataset))


def _loaded(dataset: Any) -> list[Any]:
    """The target of every sample, read with its image."""
    transform, dataset.transform = getattr(dataset, "transform", None), None
    try:
        return [dataset[i][1] for i in range(len(dataset))]
    finally:
        dataset.transform = transform
