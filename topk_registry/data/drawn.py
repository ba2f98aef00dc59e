"""Shared parts of the built-in data sets: splits, sizes, and samples in memory."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from topk_registry.registry.ranges import Interval

BLOCK = 1024  # samples drawn at a time
SPLITS = {"train": 1, "validation": 2, "test": 3}  # the numbers go into the seeds
SYNONYMS = {"val": "validation", "valid": "validation", "eval": "validation", "training": "train"}


class DrawnImages:
    """Images and labels drawn from a seed and held in memory.

    Attributes:
        images: [N, height, width, 3] in 8 bits.
        targets: the labels, or a row of 0 and 1 for each sample of several labels.
        classes: their names.
        superclasses: the family of each class, where classes have families.
    """

    images: NDArray[np.uint8]
    targets: Any
    classes: list[str]
    superclasses: list[int]
    _transform: Any = None
    _unchanged: bool = False

    @property
    def transform(self) -> Any:
        """Function applied to each image; None for none."""
        return self._transform

    @transform.setter
    def transform(self, transform: Any) -> None:
        self._transform = transform
        self._unchanged = transform is not None and _only_converts(transform, self.images.shape[1:3])

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if self._unchanged:  # an image library would take longer than a small network
            return torch.from_numpy(self.images[index]).permute(2, 0, 1), self.targets[index]
        image: Any = Image.fromarray(self.images[index])
        return (image if self._transform is None else self._transform(image)), self.targets[index]


def _only_converts(transform: Any, size: tuple[int, ...]) -> bool:
    """Whether images of this size become tensors of 8 bits and no more, as timm does without augmentation."""
    from timm.data.transforms import MaybePILToTensor
    from torchvision.transforms import CenterCrop, PILToTensor, Resize

    *steps, last = getattr(transform, "transforms", [transform])
    same = [size, list(size), *(size[:1] if size[0] == size[1] else ())]
    kept = all(isinstance(step, (Resize, CenterCrop)) and step.size in same for step in steps)
    return kept and isinstance(last, (PILToTensor, MaybePILToTensor))


def split_and_size(split: str, size: int | None, eval_size: int | None) -> tuple[str, int]:
    """Return the split under its own name, and its number of samples: by default 5000 to train on, else 2000."""
    split = SYNONYMS.get(split, split)
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    if split != "train" and eval_size is not None:
        size = eval_size
    size = (5000 if split == "train" else 2000) if size is None else size
    check_counts(size=size)
    return split, size


def draw(size: int, key: list[int], block: Callable[[np.random.Generator, int], tuple[Any, Any]]) -> tuple[Any, Any]:
    """Return images and targets by ``block(generator, first)``, always whole: no sample depends on how many follow."""
    blocks = [block(np.random.default_rng([*key, b]), b * BLOCK) for b in range(-(-size // BLOCK))]
    images, targets = (np.concatenate(parts)[:size] for parts in zip(*blocks, strict=True))
    return images, targets


def check_counts(**counts: Any) -> None:
    """Raise ValueError unless each of these options is a whole number of at least 1."""
    for name, count in counts.items():
        if not isinstance(count, (int, np.integer)) or count < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {count!r}")


def check_numbers(**numbers: tuple[Any, str]) -> None:
    """Raise ValueError unless each of these options is in its interval, written as ``"[0, inf)"``; NaN is in none."""
    for name, (value, interval) in numbers.items():
        if not isinstance(value, (int, float, np.number)) or value not in Interval.parse(interval):
            raise ValueError(f"{name} must be in {interval}, got {value!r}")
