"""Resampling of the middle of an image, with the pixels that Pillow computes for the whole image.

Pillow's ``resize`` takes a box, but rounds its edges to single precision, which changes pixels. Therefore this module
repeats Pillow's arithmetic along one axis: the weights in double precision, rounded to multiples of 2^-22, and a sum of
integers that is rounded to 8 bits. Pillow resizes the other axis.
"""

import math

import numpy as np
from PIL import Image

BITS = 22  # Pillow's precision of weights
LONGEST = 2**24  # output pixels for which NEAREST repeats the rounding errors of Pillow


def _cubic(x: np.ndarray) -> np.ndarray:
    a, x = -0.5, np.abs(x)
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def _hamming(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < 1, np.sinc(x) * (0.54 + 0.46 * np.cos(np.pi * x)), 0.0)


def _lanczos(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3.0), 0.0)


# support of each filter, and the weight at a distance from the center, for images that are enlarged
FILTERS = {
    Image.Resampling.BOX: (0.5, lambda x: ((x > -0.5) & (x <= 0.5)).astype(np.float64)),
    Image.Resampling.BILINEAR: (1.0, lambda x: np.maximum(1.0 - np.abs(x), 0.0)),
    Image.Resampling.HAMMING: (1.0, _hamming),
    Image.Resampling.BICUBIC: (2.0, _cubic),
    Image.Resampling.LANCZOS: (3.0, _lanczos),
}


def resize_middle(
    image: Image.Image, size: tuple[int, int], axis: int, length: int, resample: Image.Resampling
) -> Image.Image:
    """Enlarge an image to ``size``, but keep only the ``length`` middle rows (axis 0) or columns (axis 1).

    The pixels are those of ``image.resize`` with the same filter. ``size`` is (height, width), and must not be smaller
    than the image.
    """
    given = image.width if axis else image.height
    first, weights = _weights(given, size[axis], round((size[axis] - length) / 2), length, resample)
    low, high = int(first.min()), min(given, int(first.max()) + weights.shape[1])
    if axis:  # Pillow resizes the rows first
        middle = _along_axis(np.asarray(image.crop((low, 0, high, image.height))), first - low, weights, 1)
        return Image.fromarray(middle).resize((length, size[0]), resample)
    rows = image.crop((0, low, image.width, high)).resize((size[1], high - low), resample)
    return Image.fromarray(_along_axis(np.asarray(rows), first - low, weights, 0))


def _weights(
    given: int, wanted: int, start: int, length: int, resample: Image.Resampling
) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each pixel of the middle, the first input pixel [length] and integer weights [length, taps]."""
    scale = float(np.float32(given)) / wanted
    at = np.arange(start, start + length)
    if resample == Image.Resampling.NEAREST:
        return _nearest(scale, at, given), np.full((length, 1), 1 << BITS)
    support, weigh = FILTERS[resample]
    center = (at + 0.5) * scale
    first = np.maximum((center - support + 0.5).astype(np.int64), 0)
    last = np.minimum((center + support + 0.5).astype(np.int64), given)
    places = first[:, None] + np.arange(2 * math.ceil(support) + 1)
    values = np.where(places < last[:, None], weigh(places - center[:, None] + 0.5), 0.0)
    total = values.sum(-1, keepdims=True)
    values = np.divide(values, total, out=values, where=total != 0) * (1 << BITS)
    return first, np.trunc(np.where(values < 0, values - 0.5, values + 0.5)).astype(np.int64)


def _nearest(scale: float, at: np.ndarray, given: int) -> np.ndarray:
    places = (at + 0.5) * scale
    if at[-1] < LONGEST:  # Pillow adds up the steps, which rounds in another way than the product
        steps = np.full(at[-1] + 1, scale)
        steps[0] = 0.5 * scale
        places = np.add.accumulate(steps)[at]
    return np.minimum(places.astype(np.int64), given - 1)


def _along_axis(pixels: np.ndarray, first: np.ndarray, weights: np.ndarray, axis: int) -> np.ndarray:
    total: np.ndarray | int = 1 << (BITS - 1)
    shape = [1] * pixels.ndim
    shape[axis] = len(first)
    for tap in range(weights.shape[1]):
        # past the last pixel, the weight is 0
        part = pixels.take(np.minimum(first + tap, pixels.shape[axis] - 1), axis).astype(np.int64)
        total = total + part * weights[:, tap].reshape(shape)
    return np.clip(total >> BITS, 0, 255).astype(np.uint8)
