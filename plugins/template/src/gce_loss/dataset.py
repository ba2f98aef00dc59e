"""``timm train --dataset topk/gce_stripes``: images of stripes, drawn when they are asked for."""

from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

SPLITS = {"train": 0, "validation": 1}  # the numbers go into the seeds
SIDE = 32


class Stripes:
    """Stripes in noise; the class is their direction.

    Image i depends on the seed, the split and i alone, so nothing is stored and a run that resumes sees the same.

    Args:
        split: ``"train"`` or ``"validation"``.
        size: number of images.
        directions: number of classes.
        noise: standard deviation of the noise; the stripes go from -1 to 1.
        seed: of every image.
    """

    def __init__(
        self, split: str = "train", *, size: int = 2000, directions: int = 8, noise: float = 0.5, seed: int = 0
    ) -> None:
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
        if size < 1 or directions < 2:
            raise ValueError(f"need at least 1 image and 2 directions, got {size=}, {directions=}")
        self.classes = [f"{180 * c / directions:g} degrees" for c in range(directions)]  # the names, in order
        self.targets = [i % directions for i in range(size)]  # the labels: counting classes then reads no image
        self.transform: Callable[[Image.Image], Any] | None = None  # the trainer sets it
        self.noise, self._key = noise, [seed, SPLITS[split]]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, i: int) -> tuple[Any, int]:
        image = self._draw(i)
        return (image if self.transform is None else self.transform(image)), self.targets[i]

    def _draw(self, i: int) -> Image.Image:
        rng = np.random.default_rng([*self._key, i])
        angle = np.pi * self.targets[i] / len(self.classes)
        y, x = np.mgrid[:SIDE, :SIDE]
        wave = np.sin((x * np.cos(angle) + y * np.sin(angle)) * rng.uniform(0.6, 0.9) + rng.uniform(0, 2 * np.pi))
        grey = wave[..., None] + self.noise * rng.standard_normal((SIDE, SIDE, 3))
        return Image.fromarray(np.clip(128 + 60 * grey, 0, 255).astype(np.uint8))
