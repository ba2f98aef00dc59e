"""Functions that read the labels and the class names of a map-style data set.

If possible, the functions do not read images. If images can have several labels, targets are k-hot. A k-hot target is a
vector [n] with 1 for each label of the image, and 0 for all other classes.
"""

from collections.abc import Sized
from typing import Any

import numpy as np
from numpy.typing import NDArray

Labels = NDArray[np.int64]
MULTILABEL = "each image has several labels: use --task multilabel"


def targets_of(dataset: Any) -> NDArray[Any] | None:
    """Return the targets of all samples: class indices [N], or k-hot vectors [N, n].

    If the targets cannot be read without the images, return None. The targets can be read if the data set has an
    attribute ``targets`` or ``labels``, as in torchvision, or if timm opened a folder or a data set of Hugging Face.
    """
    reader = getattr(dataset, "reader", dataset)
    stored = [getattr(dataset, name, None) for name in ("targets", "labels")]
    kept = next((each for each in stored if each is not None and not callable(each)), None)
    if kept is None and hasattr(reader, "samples"):
        kept = [target for _, target in reader.samples]
    elif kept is None and hasattr(reader, "iter_targets"):
        kept = list(reader.iter_targets())
    if kept is not None and len(kept) and (encode := getattr(dataset, "target_transform", None)) is not None:
        kept = [np.asarray(encode(target)) for target in kept]
    return None if kept is None else np.asarray(kept, np.float32 if len(kept) and np.ndim(kept[0]) else np.int64)


def kept_labels_of(dataset: Any) -> Labels | None:
    """Return the labels [N], or None if only the images have the labels. For k-hot targets, raise ValueError."""
    kept = targets_of(dataset)
    if kept is not None and kept.ndim > 1:
        raise ValueError(MULTILABEL)
    return kept


def labels_of(dataset: Any) -> Labels:
    """Return the label of every sample: [N]. If necessary, read all images. For k-hot targets, raise ValueError."""
    kept = kept_labels_of(dataset)
    if kept is not None:
        return kept
    transform, dataset.transform = getattr(dataset, "transform", None), None
    try:
        return np.asarray([dataset[i][1] for i in range(len(dataset))], np.int64)
    finally:
        dataset.transform = transform


def class_names_of(dataset: Any) -> list[str] | None:
    """Return the class names, such as ["cat/kitty", "dog"] if class 0 has two names. Without names, return None."""
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
    """Return whether a data set supports ``dataset[i]`` and ``len(dataset)``. Return False for a stream."""
    return hasattr(dataset, "__getitem__") and isinstance(dataset, Sized) and not hasattr(dataset, "__iter__")


def class_counts(labels: Labels, num_classes: int) -> list[int]:
    """Return the number of samples of each class: [num_classes]. If a label is out of range, raise ValueError."""
    if len(labels) and not (labels.min() >= 0 and labels.max() < num_classes):
        wrong = labels.min() if labels.min() < 0 else labels.max()
        raise ValueError(f"expected labels in [0, {num_classes - 1}], got {wrong}; see --num-classes")
    return np.bincount(labels, minlength=num_classes).tolist()
