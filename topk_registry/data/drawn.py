"""Shared parts of the built-in data sets: splits, numbers of samples, and samples in memory."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from topk_registry.registry.ranges import Interval

BLOCK = 1024  # number of samples per block
SPLITS = {"train": 1, "validation": 2, "test": 3}  # part of the seed of each sample
SYNONYMS = {"val": "validation", "valid": "validation", "eval": "validation", "training": "train"}


class DrawnImages:
    """Images and labels that are generated from a seed and stored in memory.

    Attributes:
        images: [N, height, width, 3] in 8 bits.
        targets: labels [N], or k-hot vectors [N, n] for several labels per image.
        classes: class names.
        superclasses: superclass of each class, if classes have superclasses.
    """

    images: NDArray[np.uint8]
    targets: Any
    classes: list[str]
    superclasses: list[int]
    _transform: Any = None
    _unchanged: bool = False

    @property
    def transform(self) -> Any:
        """Function that is applied to each image, or None."""
        return self._transform

    @transform.setter
    def transform(self, transform: Any) -> None:
        self._transform = transform
        self._unchanged = transform is not None and _only_converts(transform, self.images.shape[1:3])

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if self._unchanged:  # faster than a transform of an image library
            return torch.from_numpy(self.images[index]).permute(2, 0, 1), self.targets[index]
        image: Any = Image.fromarray(self.images[index])
        return (image if self._transform is None else self._transform(image)), self.targets[index]


def _only_converts(transform: Any, size: tuple[int, ...]) -> bool:
    """Return whether a transform only converts images of this size to 8-bit tensors, without augmentation."""
    from timm.data.transforms import MaybePILToTensor
    from torchvision.transforms import CenterCrop, PILToTensor, Resize

    *steps, last = getattr(transform, "transforms", [transform])
    same = [size, list(size), *(size[:1] if size[0] == size[1] else ())]
    kept = all(isinstance(step, (Resize, CenterCrop)) and step.size in same for step in steps)
    return kept and isinstance(last, (PILToTensor, MaybePILToTensor))


def split_and_size(split: str, size: int | None, eval_size: int | None) -> tuple[str, int]:
    """Return the name of the split and its number of samples. Default: 5000 for training, 2000 otherwise."""
    split = SYNONYMS.get(split, split)
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    if split != "train" and eval_size is not None:
        size = eval_size
    size = (5000 if split == "train" else 2000) if size is None else size
    check_counts(size=size)
    return split, size


def draw(size: int, key: list[int], block: Callable[[np.random.Generator, int], tuple[Any, Any]]) -> tuple[Any, Any]:
    """Return images and targets from calls of ``block(generator, first)``. Samples do not depend on ``size``."""
    blocks = [block(np.random.default_rng([*key, b]), b * BLOCK) for b in range(-(-size // BLOCK))]
    images, targets = (np.concatenate(parts)[:size] for parts in zip(*blocks, strict=True))
    return images, targets


def check_counts(**counts: Any) -> None:
    """Raise ValueError unless each option is an integer of at least 1."""
    for name, count in counts.items():
        if not isinstance(count, (int, np.integer)) or count < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {count!r}")


def check_numbers(**numbers: tuple[Any, str]) -> None:
    """Raise ValueError unless each option is in its interval. An interval is text such as ``"[0, inf)"``."""
    for name, (value, interval) in numbers.items():
        if not isinstance(value, (int, float, np.number)) or value not in Interval.parse(interval):
            raise ValueError(f"{name} must be in {interval}, got {value!r}")
