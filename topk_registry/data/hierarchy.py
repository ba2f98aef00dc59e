"""The data set ``topk/hierarchy``: generated images whose classes form superclasses.

As in CIFAR-100, there are 20 superclasses with 5 classes each by default, and images have 32 x 32 pixels. Each of the S
superclasses has a smooth random color pattern ``coarse``. Each class has a second, less smooth pattern ``fine``. An
image of class c is

    image = contrast * shift(coarse[c mod S] + fine_amplitude * fine[c]) + pixel_noise * Z.

``contrast`` is a random number from 0.6 to 1.4. ``shift`` moves the patterns by up to 4 pixels. Z is standard normal
noise. All patterns have standard deviation 1. ``fine_amplitude`` and ``pixel_noise`` are options. At the end, values
are scaled to integers from 0 to 255. A model can easily distinguish superclasses, but not the classes of a superclass.
"""

import numpy as np
from numpy.typing import NDArray

from topk_registry.data.drawn import BLOCK, SPLITS, DrawnImages, check_counts, check_numbers, draw, split_and_size

SIZE = 32
SHIFT = 4
SPREAD = 42.0  # standard deviation of an image in gray levels; the gray levels 128 +- 3 * 42 are in [0, 255]


class Hierarchy(DrawnImages):
    """Generated images of ``superclasses * fine`` classes. Class c belongs to superclass c mod ``superclasses``.

    Image i has the label i mod n, where n is the number of classes. Image i does not depend on ``size`` or
    ``eval_size``. All images are in memory, with 3 KiB per image.

    Args:
        split: ``"train"``, ``"validation"`` or ``"test"``.
        size: number of images of the training split. Default: 5000.
        eval_size: number of images of the validation or test split. Default: ``size`` if given, else 2000.
        seed: seed of all random numbers.
        superclasses: number of superclasses.
        fine: number of classes per superclass.
        fine_amplitude: standard deviation of the class pattern. The superclass pattern has standard deviation 1.
        pixel_noise: standard deviation of the noise of each pixel.

    Example:
        >>> image, label = Hierarchy("train", size=1000)[0]
    """

    def __init__(
        self,
        split: str = "train",
        *,
        size: int | None = None,
        eval_size: int | None = None,
        seed: int = 0,
        superclasses: int = 20,
        fine: int = 5,
        fine_amplitude: float = 0.35,
        pixel_noise: float = 8.0,
    ) -> None:
        split, size = split_and_size(split, size, eval_size)
        check_counts(superclasses=superclasses, fine=fine)
        check_numbers(fine_amplitude=(fine_amplitude, "[0, inf)"), pixel_noise=(pixel_noise, "[0, inf)"))
        if (n := superclasses * fine) < 2:
            raise ValueError(f"need at least 2 classes, got {superclasses=}, {fine=}")
        self.superclasses = [c % superclasses for c in range(n)]
        self.classes = [f"field {c % superclasses:02d}-{c // superclasses}" for c in range(n)]
        rng = np.random.default_rng([seed, 0])
        coarse, finer = (_smooth(rng.standard_normal((count, 3, g, g))) for count, g in ((superclasses, 4), (n, 6)))
        self._fields, self._noise = coarse[self.superclasses] + fine_amplitude * finer, pixel_noise
        self.images, labels = draw(size, [seed, SPLITS[split]], self._block)
        self.targets = labels.tolist()

    def _block(self, rng: np.random.Generator, first: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        labels = (first + np.arange(BLOCK)) % len(self._fields)
        shift = rng.integers(-SHIFT, SHIFT + 1, (BLOCK, 2))
        contrast = rng.uniform(0.6, 1.4, BLOCK)
        z = rng.standard_normal((BLOCK, 3, SIZE, SIZE), np.float32)
        rows, columns = ((np.arange(SIZE) + shift[:, axis : axis + 1]) % SIZE for axis in (0, 1))  # [b, 32]
        image = self._fields[labels[:, None, None], :, rows[:, :, None], columns[:, None, :]]  # [b, 32, 32, 3]
        image = contrast[:, None, None, None] * image + self._noise * z.transpose(0, 2, 3, 1)
        levels = 128 + SPREAD / np.hypot(1.0, self._noise) * image
        return np.clip(np.rint(levels), 0, 255).astype(np.uint8), labels


def _smooth(grid: NDArray[np.float64]) -> NDArray[np.float64]:
    """Enlarge [..., g, g] to [..., 32, 32] by periodic linear interpolation, and scale to standard deviation 1."""
    g = grid.shape[-1]
    place = np.arange(SIZE) * g / SIZE
    low = place.astype(int)
    share = place - low
    for axis, w in ((-2, share[:, None]), (-1, share)):
        grid = (1 - w) * np.take(grid, low, axis) + w * np.take(grid, (low + 1) % g, axis)
    return grid / grid.std(axis=(-3, -2, -1), keepdims=True)
