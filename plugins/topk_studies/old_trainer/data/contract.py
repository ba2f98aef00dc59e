"""The contract of a registered data set, and what is wrong with one by its first sample.

A data set is an entry point of the group ``topk_registry.datasets``: a factory that ``--dataset topk/NAME`` calls with
the split and with the options of ``--dataset-opt``.

    factory(split, **options)   "train", "validation" or another name of the data set's own; one that it lacks is a
                                ValueError that names those there are
    len(dataset)                the number of samples
    dataset[i]                  a pair: the image, and the label as a whole number from 0 to n - 1
    dataset.transform           None at first. The trainer sets it once, for each split its own; dataset[i] gives
                                transform(image) then, and a PIL image without one
    dataset.classes             the names of the n classes, in order, the same for each split
    dataset.targets             the labels of all samples, in order; without it every image is read to count classes
    dataset.superclasses        optional: the family of each class, for label noise within families

A data set for ``--task multilabel`` differs in two lines:

    dataset[i]                  a pair: the image, and a floating-point vector [n] with 1 for each label, 0 elsewhere
    dataset.targets             these vectors of all samples [N, n]

It is pickled where workers are started afresh. Random numbers are those of ``random``, ``numpy.random`` and ``torch``,
which the trainer seeds for each batch. ``topk-registry check-dataset NAME`` tries all of it.
"""

import operator
from typing import Any

import numpy as np
import torch
from PIL import Image

from topk_registry.data.labels import MULTILABEL, class_names_of, is_indexed


def first_problem(dataset: Any, *, several: bool = False) -> str:
    """Return what would stop training with a data set of images, by its first sample; nothing where it is right.

    A stream is taken as it is: reading its first sample may be the beginning of a pass.

    Args:
        dataset: from a factory.
        several: whether training wants several labels an image.
    """
    if not is_indexed(dataset):
        return "" if hasattr(dataset, "__iter__") else no_data_set(dataset)
    if len(dataset) == 0:
        return ""  # said elsewhere, by the name of the split
    names = class_names_of(dataset)
    if several and names is None:
        return "a data set of several labels an image has an attribute classes, the names of the classes in order"
    problem = problem_of_sample(dataset[0], len(names) if names else None, several=several)
    return problem or problem_of_transform(dataset)


def has_k_hot_targets(sample: Any) -> bool:
    """Whether a sample is of several labels, by the shape of its target."""
    return isinstance(sample, tuple) and len(sample) == 2 and np.ndim(sample[1]) == 1


def problem_of_sample(sample: Any, num_classes: int | None, *, several: bool = False) -> str:
    """Return what is wrong with a sample that no transform was applied to."""
    if not isinstance(sample, tuple) or len(sample) != 2:
        return f"a sample is a tuple (image, label), got {_told(sample)}"
    image, label = sample
    if not isinstance(image, Image.Image):
        return f"without a transform the image of a sample is a PIL image, got {_told(image)}"
    if several:
        return problem_of_target(label, num_classes)
    if has_k_hot_targets(sample):
        return f"a label is a whole number, got {_told(label)}; {MULTILABEL}"
    return problem_of_label(label, num_classes)


def problem_of_target(target: Any, num_classes: int | None) -> str:
    """Return what is wrong with the target of an image of several labels."""
    n = "n" if num_classes is None else num_classes
    if np.ndim(target) == 0:
        return f"with --task multilabel a target is a vector [{n}], got {_told(target)}: one label an image"
    if not isinstance(target, (np.ndarray, torch.Tensor)) or target.ndim != 1 or num_classes not in (None, len(target)):
        return f"the target of several labels is a vector [{n}] of NumPy or torch, got {_told(target)}"
    values = torch.as_tensor(target)
    if not values.is_floating_point():
        return f"the target of several labels is floating point, got {_told(target)}"
    if not bool(((values >= 0) & (values <= 1)).all()):
        return f"a target holds 1 for a label and 0 elsewhere, got numbers from {values.min():g} to {values.max():g}"
    return ""


def problem_of_label(label: Any, num_classes: int | None) -> str:
    """Return what is wrong with a label."""
    try:
        number = -1 if isinstance(label, bool) else operator.index(label)
    except TypeError:
        return f"a label is a whole number, got {_told(label)}"
    if isinstance(label, bool):
        return f"a label is a whole number, got {label!r}"
    if number < 0 or (num_classes is not None and number >= num_classes):
        end = "" if num_classes is None else f" to {num_classes - 1}, as there are {num_classes} classes"
        return f"labels count from 0{end}, got {number}"
    return ""


def problem_of_transform(dataset: Any) -> str:
    """Return why the transform that a trainer sets is not applied; the data set's own is put back."""
    seen: list[Any] = []
    before = getattr(dataset, "transform", None)

    def probe(image: Any) -> Any:
        seen.append(image)
        return probe

    try:
        dataset.transform = probe
    except AttributeError as error:
        return f"the attribute transform cannot be set: {error}"
    try:
        image = dataset[0][0]
    finally:
        dataset.transform = before
    if not seen:
        return "dataset.transform was set and not called: dataset[i] must give (transform(image), label)"
    if not isinstance(seen[0], Image.Image):
        return f"the transform is called with a PIL image, got {_told(seen[0])}"
    return "" if image is probe else f"a sample's image must be what the transform returned, got {_told(image)}"


def no_data_set(given: Any) -> str:
    """Return why samples cannot be picked from what a factory gave."""
    lacking = [name for name in ("__getitem__", "__len__") if not hasattr(given, name)]
    what = f"it has no {' and no '.join(lacking)}" if lacking else "it is a stream"
    return f"a data set has a length and gives dataset[i], got {_told(given)}; {what}"


def _told(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if shape is not None and hasattr(value, "dtype"):
        return f"{type(value).__name__} {value.dtype} {list(shape)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)} ({', '.join(type(part).__name__ for part in value)})"
    return f"{type(value).__name__} {value!r}" if isinstance(value, (int, float, str)) else type(value).__name__
