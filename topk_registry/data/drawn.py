"""Base class and functions of the built-in data sets, whose samples are generated from a seed."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from topk_registry.registry.ranges import Interval

BLOCK = 1024  # number of samples that are generated at once
SPLITS = {"train": 1, "validation": 2, "test": 3}  # the number of a split is a part of the seed of its samples
SYNONYMS = {"val": "validation", "valid": "validation", "eval": "validation", "training": "train"}


class DrawnImages:
    """A data set of pairs (image, target) in memory. A subclass sets ``images``, ``targets`` and ``classes``."""

    images: NDArray[np.uint8]  # [N, height, width, 3]
    targets: Any  # class indices [N], or k-hot vectors [N, n] if images have several labels
    classes: list[str]  # class names [n]
    superclasses: list[int]  # index of the superclass of each class [n]; not set if there are no superclasses
    _transform: Any = None
    _unchanged: bool = False

    @property
    def transform(self) -> Any:
        """Function that is applied to each Pillow image. If None, ``dataset[i]`` returns the Pillow image itself."""
        return self._transform

    @transform.setter
    def transform(self, transform: Any) -> None:
        self._transform = transform
        self._unchanged = transform is not None and _only_converts(transform, self.images.shape[1:3])

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if self._unchanged:  # the result of the transform, but faster, because no Pillow image is created
            return torch.from_numpy(self.images[index]).permute(2, 0, 1), self.targets[index]
        image: Any = Image.fromarray(self.images[index])
        return (image if self._transform is None else self._transform(image)), self.targets[index]


def _only_converts(transform: Any, size: tuple[int, ...]) -> bool:
    """Return whether a transform converts images of this size to uint8 tensors and changes no pixel."""
    from timm.data.transforms import MaybePILToTensor
    from torchvision.transforms import CenterCrop, PILToTensor, Resize

    *steps, last = getattr(transform, "transforms", [transform])
    same = [size, list(size), *(size[:1] if size[0] == size[1] else ())]
    kept = all(isinstance(step, (Resize, CenterCrop)) and step.size in same for step in steps)
    return kept and isinstance(last, (PILToTensor, MaybePILToTensor))


def split_and_size(split: str, size: int | None, eval_size: int | None) -> tuple[str, int]:
    """Return the canonical name of a split, such as ``"validation"`` for ``"val"``, and the number of its samples.

    For ``"train"``, the number is ``size``, or 5000 if ``size`` is None. For the other splits, the number is
    ``eval_size``. If ``eval_size`` is None, the number is ``size``. If both are None, the number is 2000.
    """
    split = SYNONYMS.get(split, split)
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    if split != "train" and eval_size is not None:
        size = eval_size
    size = (5000 if split == "train" else 2000) if size is None else size
    check_counts(size=size)
    return split, size


def draw(size: int, key: list[int], block: Callable[[np.random.Generator, int], tuple[Any, Any]]) -> tuple[Any, Any]:
    """Generate ``size`` samples in blocks, and return their images and targets as arrays.

    ``block(generator, first)`` returns the images and targets of ``BLOCK`` samples, from the sample with index
    ``first`` on. The seed of the generator consists of ``key`` and the index of the block. Therefore a sample does not
    depend on ``size``.
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
