"""Base class and functions of the built-in data sets, whose samples are generated from a seed."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from topk_registry.data.folders import EVALUATION, TRAINING
from topk_registry.registry.ranges import Interval

BLOCK = 1024  # number of samples that are generated at once
SPLITS = {"train": 1, "validation": 2, "test": 3}  # the number of a split is a part of the seed of its samples


class DrawnImages:
    """A data set of pairs (image, target) in memory. A subclass sets ``images``, ``targets`` and ``classes``."""

    images: NDArray[np.uint8]  # [N, height, width, 3]
    targets: Any  # class indices [N], or k-hot vectors [N, n] if images have several labels
    classes: list[str]  # class names [n]
    superclasses: list[int]  # index of the superclass of each class [n]; not set if there are no superclasses
    transform: Any = None  # function of a Pillow image; if None, dataset[i] returns the Pillow image itself

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if only_converts(self.transform, self.images.shape[1:3]):  # Pillow would take a fifth of the built-in job
            return torch.from_numpy(self.images[index].copy()).permute(2, 0, 1), self.targets[index]
        image: Any = Image.fromarray(self.images[index])
        return (image if self.transform is None else self.transform(image)), self.targets[index]


def only_converts(transform: Any, size: tuple[int, ...]) -> bool:
    """Return whether the only effect of a transform on images of this size is the conversion to uint8 tensors."""
    *steps, last = getattr(transform, "transforms", None) or [transform]
    return type(last).__name__ in ("PILToTensor", "MaybePILToTensor") and all(
        type(step).__name__ in ("Resize", "CenterCrop") and step.size in (size, list(size), min(size)) for step in steps
    )


def split_and_size(split: str, size: int | None, eval_size: int | None) -> tuple[str, int]:
    """Return the canonical name of a split, such as ``"validation"`` for ``"val"``, and the number of its samples.

    ``"train"`` has ``size`` samples (default 5000). Other splits have ``eval_size``, else ``size``, else 2000.
    """
    split = "train" if split in TRAINING else "validation" if split in EVALUATION else split
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    sizes = (size, 5000) if split == "train" else (eval_size, size, 2000)
    size = next(each for each in sizes if each is not None)
    check_counts(size=size)
    return split, size


def draw(size: int, key: list[int], block: Callable[[np.random.Generator, int], tuple[Any, Any]]) -> tuple[Any, Any]:
    """Generate ``size`` samples in blocks, and return their images and targets as arrays.

    ``block(generator, first)`` returns the images and targets of ``BLOCK`` samples from sample ``first`` on. The seed
    of the generator consists of ``key`` and the index of the block, so a sample does not depend on ``size``.
    """
    blocks = [block(np.random.default_rng([*key, b]), b * BLOCK) for b in range(-(-size // BLOCK))]
    images, targets = (np.concatenate(parts)[:size] for parts in zip(*blocks, strict=True))
    return images, targets


def check_counts(**counts: Any) -> None:
    for name, count in counts.items():
        if not isinstance(count, (int, np.integer)) or count < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {count!r}")


def check_numbers(**numbers: tuple[Any, str]) -> None:
    """Raise ValueError unless each option, such as ``tau=(0.1, "[0, inf)")``, has a value in its interval."""
    for name, (value, interval) in numbers.items():
        if not isinstance(value, (int, float, np.number)) or value not in Interval.parse(interval):
            raise ValueError(f"{name} must be in {interval}, got {value!r}")
