"""A generated data set of images with several labels per image. No download is needed.

Each class has a thing: a patch of 12 x 12 pixels with smooth random colors. An image has 32 x 32 pixels, and shows the
things of its labels at random places, with random contrast and noise. Where things overlap, the colors are added. Each
class belongs to a scene. A thing appears more often in images of its scene than in other images. Class frequencies fall
from the first to the last class. An image may have no label.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from topk_registry.data.drawn import BLOCK, SPLITS, DrawnImages, check_counts, check_numbers, draw, split_and_size

SIZE = 32
THING = 12  # height and width of a thing
HOME = 5.0  # frequency of a thing in images of its scene, divided by its frequency in other images
SPREAD = 42.0  # standard deviation of the pixels, in levels from 0 to 255


class Several(DrawnImages):
    """Generated images with several labels, for multi-label classification.

    Each class has a thing, a small patch of colors. An image shows the things of all its labels. A sample is a pair of
    the image and the target, a float32 vector [n] that is 1 for the labels of the image and 0 for other classes. Image
    i depends only on the seed, the split and i, and on the options of the data set. The images are stored in memory,
    with 3 KiB per image.

    Args:
        split: ``"train"``, ``"validation"`` or ``"test"``.
        size: number of images. None: 5000 for the split ``"train"``, and 2000 for the other splits.
        eval_size: number of images in the splits other than ``"train"``. None: ``size``.
        seed: seed of the things and of every image.
        things: number of classes n.
        scenes: number of scenes. Class c belongs to scene c mod ``scenes``. A thing appears more often in images of its
            scene.
        mean_labels: average number of labels per image.
        imbalance: frequency of the first class divided by the frequency of the last class. In between, frequencies fall
            exponentially.
        pixel_noise: standard deviation of the noise, in units of the standard deviation of a thing.

    Attributes:
        targets: the targets of all samples [N, n], float32.

    Example:
        >>> image, target = Several("train", size=100)[0]
        >>> target.shape
        torch.Size([20])
    """

    def __init__(
        self,
        split: str = "train",
        *,
        size: int | None = None,
        eval_size: int | None = None,
        seed: int = 0,
        things: int = 20,
        scenes: int = 4,
        mean_labels: float = 2.5,
        imbalance: float = 10.0,
        pixel_noise: float = 2.0,
    ) -> None:
        split, size = split_and_size(split, size, eval_size)
        check_counts(things=things, scenes=scenes)
        if things < 2:
            raise ValueError(f"need at least 2 classes, got {things=}")
        check_numbers(
            mean_labels=(mean_labels, f"(0, {things})"),
            imbalance=(imbalance, "[1, inf)"),
            pixel_noise=(pixel_noise, "[0, inf)"),
        )
        self.classes = [f"thing {c:02d}" for c in range(things)]
        self._noise = pixel_noise
        self._things = _patches(np.random.default_rng([seed, 0]), things)
        self._probabilities = _probabilities(things, scenes, mean_labels, imbalance)
        self.images, self.targets = draw(size, [seed, SPLITS[split]], self._block)

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        image, target = super().__getitem__(index)
        return image, torch.from_numpy(target)

    def _block(self, rng: np.random.Generator, first: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        n = len(self._things)
        scene = rng.integers(len(self._probabilities), size=BLOCK)
        labels = rng.random((BLOCK, n)) < self._probabilities[scene]
        places = rng.integers(SIZE - THING + 1, size=(BLOCK, n, 2))
        contrast = rng.uniform(2.0, 4.0, (BLOCK, n))
        images = self._noise * rng.standard_normal((BLOCK, SIZE, SIZE, 3), np.float32)
        for i, c in np.argwhere(labels):
            y, x = places[i, c]
            images[i, y : y + THING, x : x + THING] += contrast[i, c] * self._things[c]
        levels = 128 + SPREAD / np.hypot(1.0, self._noise) * images
        return np.clip(np.rint(levels), 0, 255).astype(np.uint8), labels.astype(np.float32)


def _patches(rng: np.random.Generator, things: int) -> NDArray[np.float64]:
    # things [n, 12, 12, 3]: 3 x 3 random colors with linear transitions, scaled to standard deviation 1
    grid = rng.standard_normal((things, 3, 3, 3))
    place = np.linspace(0, 2, THING)
    share = np.maximum(0.0, 1.0 - np.abs(place[:, None] - np.arange(3)))  # [12, 3]
    patches = np.einsum("yi,xj,cijk->cyxk", share, share, grid)
    return patches / patches.std(axis=(1, 2, 3), keepdims=True)


def _probabilities(things: int, scenes: int, mean_labels: float, imbalance: float) -> NDArray[np.float64]:
    # the probability of each class in each scene [scenes, n], such that an image has mean_labels labels on average
    c = np.arange(things)
    shape = imbalance ** -(c / (things - 1)) * np.where(c % scenes == np.arange(scenes)[:, None], HOME, 1.0)
    low, high = 0.0, 1.0 / shape.min()  # at the upper end, every probability is 1
    for _ in range(60):
        middle = (low + high) / 2
        more = np.minimum(1.0, middle * shape).sum(axis=1).mean() < mean_labels
        low, high = (middle, high) if more else (low, middle)
    return np.minimum(1.0, low * shape)
