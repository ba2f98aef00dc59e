"""A procedural image data set whose classes come in families, so that top-k learning can be tried with no download.

As in CIFAR-100 there are 20 superclasses of 5 fine classes, and images of 32 x 32. A superclass is a smooth random
colour field, a fine class adds a finer and fainter field, and an image of class c, in units of the coarse
field's standard deviation, is

    image = contrast * shift(coarse[c mod S] + fine_amplitude * fine[c]) + noise * Z,        Z ~ N(0, 1)

Telling superclasses apart is easy; telling the five of a family apart is not, which is where top-5 and top-1 part.
"""

import numpy as np
from numpy.typing import NDArray

from topk_registry.data.drawn import BLOCK, SPLITS, DrawnImages, check_counts, check_numbers, split_and_size

SIZE = 32
SHIFT = 4
SPREAD = 42.0  # standard deviation of an image in grey levels: within three of them nothing is cut off


class Hierarchy(DrawnImages):
    """Images of ``superclasses * fine`` classes, drawn from a seed; class c is of superclass c mod ``superclasses``.

    Image i depends on the seed, the split and i alone: a larger data set begins with the smaller one. Classes take
    turns, so that every class has the same number of images, give or take one. The images are held in memory, 3 KiB
    each.

    Args:
        split: ``"train"``, ``"validation"`` or ``"test"``.
        size: number of images, by default 5000 for training and 2000 otherwise.
        eval_size: the same of all splits but training, where it is to differ from ``size``.
        seed: of the class fields and of every image.
        superclasses, fine: how many superclasses, and fine classes in each.
        fine_amplitude: what tells the fine classes of a superclass apart, in units of what tells superclasses apart.
        pixel_noise: standard deviation of the noise, in the same units.

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
        if superclasses * fine < 2:
            raise ValueError(f"need at least 2 classes, got {superclasses=}, {fine=}")
        n = superclasses * fine
        self.superclasses = [c % superclasses for c in range(n)]
        self.classes = [f"field {c % superclasses:02d}-{c // superclasses}" for c in range(n)]
        self.targets = [i % n for i in range(size)]
        fields = _fields(np.random.default_rng([seed, 0]), superclasses, n, fine_amplitude)
        self.images = _render(fields, np.asarray(self.targets), pixel_noise, [seed, SPLITS[split]])  # [size, 32, 32, 3]


def _fields(rng: np.random.Generator, superclasses: int, n: int, amplitude: float) -> NDArray[np.float64]:
    coarse = _smooth(rng.standard_normal((superclasses, 3, 4, 4)))
    return coarse[np.arange(n) % superclasses] + amplitude * _smooth(rng.standard_normal((n, 3, 6, 6)))


def _smooth(grid: NDArray[np.float64]) -> NDArray[np.float64]:
    """Enlarge [..., g, g] to [..., 32, 32] by periodic linear interpolation, then to unit standard deviation."""
    g = grid.shape[-1]
    place = np.arange(SIZE) * g / SIZE
    low = place.astype(int)
    share = place - low
    for axis in (-2, -1):
        here, there = np.take(grid, low, axis), np.take(grid, (low + 1) % g, axis)
        w = share if axis == -1 else share[:, None]
        grid = (1 - w) * here + w * there
    return grid / grid.std(axis=(-3, -2, -1), keepdims=True)


def _render(fields: NDArray[np.float64], labels: NDArray[np.int64], noise: float, key: list[int]) -> NDArray[np.uint8]:
    images = np.empty((len(labels), SIZE, SIZE, 3), np.uint8)
    for block, start in enumerate(range(0, len(labels), BLOCK)):
        rows = _render_block(fields, labels[start : start + BLOCK], noise, np.random.default_rng([*key, block]))
        images[start : start + BLOCK] = rows
    return images


def _render_block(
    fields: NDArray[np.float64], labels: NDArray[np.int64], noise: float, rng: np.random.Generator
) -> NDArray[np.uint8]:
    # always a whole block, so that image i does not depend on how many follow it
    shift = rng.integers(-SHIFT, SHIFT + 1, (BLOCK, 2))[: len(labels)]
    contrast = rng.uniform(0.6, 1.4, BLOCK)[: len(labels)]
    z = rng.standard_normal((BLOCK, 3, SIZE, SIZE), np.float32)[: len(labels)]
    rows = (np.arange(SIZE) + shift[:, :1]) % SIZE  # [b, 32]
    columns = (np.arange(SIZE) + shift[:, 1:]) % SIZE
    image = fields[labels[:, None, None], :, rows[:, :, None], columns[:, None, :]]  # [b, 32, 32, 3]
    image = contrast[:, None, None, None] * image + noise * z.transpose(0, 2, 3, 1)
    return np.clip(np.rint(128 + SPREAD / np.hypot(1.0, noise) * image), 0, 255).astype(np.uint8)
