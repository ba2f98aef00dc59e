"""Preprocessing of images for an exported model, with numpy and Pillow.

The steps are: decode, convert to RGB or gray, resize, crop the center, scale to [0, 1], and normalize. The pixels are
equal to the pixels of timm's evaluation transform. As in timm, JPEG files are decoded at full resolution, without
Pillow's method ``draft``.

timm resizes the whole image and then crops. A narrow strip would become very large: with the target size 256, an image
of 1 x 60000 pixels becomes 256 x 15360000. An image that would become larger than ``MAX_PIXELS`` is an error.
"""

import io
import math
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from topk_export.errors import ImageError, ImageTooLargeError, ModelFileError

ENDINGS = {
    "JPEG": (".jpg", ".jpeg", ".jfif"),
    "PNG": (".png",),
    "WEBP": (".webp",),
    "GIF": (".gif",),
    "BMP": (".bmp",),
    "TIFF": (".tif", ".tiff"),
    "PPM": (".ppm",),
    "AVIF": (".avif",),  # if Pillow was built with libavif
    "HEIF": (".heic", ".heif"),  # if pillow-heif is installed
}


def readable_formats() -> tuple[str, ...]:
    """Return the names of the image formats in ``ENDINGS`` that the installed Pillow can decode."""
    with suppress(ImportError):
        import pillow_heif  # type: ignore

        pillow_heif.register_heif_opener()
    known = Image.registered_extensions()
    return tuple(name for name, endings in ENDINGS.items() if known.get(endings[0]) == name)


FORMATS = readable_formats()
SUFFIXES = {ending for name in FORMATS for ending in ENDINGS[name]}
MAX_PIXELS = 64_000_000
RESAMPLE = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "box": Image.Resampling.BOX,
    "hamming": Image.Resampling.HAMMING,
    "lanczos": Image.Resampling.LANCZOS,
}
COLORS = {1: "L", 3: "RGB"}
UNKNOWN = "unknown"
CROP_MODES = ("center", "border", "squash")


@dataclass(frozen=True)
class Preprocess:
    """Preprocessing of evaluation images, with the options of timm.

    Args:
        input_size: channels, height and width of the model's input.
        mean, std: mean and standard deviation per channel, for pixel values that were scaled to [0, 1]. If the values
            are unknown, both are empty.
        interpolation: a key of :data:`RESAMPLE`.
        crop_pct: height and width of the crop, divided by the target height and width of the resize step.
        crop_mode: how images are resized to the target size. With ``"center"``, the shortest edge gets the target size.
            With ``"border"``, the longest edge gets the target size, and the image is padded with the mean color. With
            ``"squash"``, both edges get the target size, and the aspect ratio changes.
        resize_size: target height and width. None: the height and width in ``input_size``, divided by ``crop_pct`` and
            rounded down.
        color: ``"RGB"`` for 3 channels, ``"L"`` (gray) for 1 channel, and ``""`` for other numbers of channels. If
            ``mean`` and ``std`` are unknown, ``color`` is ``"unknown"``. With ``""`` or ``"unknown"``, the model takes
            only arrays, not images.
        exif: whether images are rotated as their EXIF orientation says. timm ignores the EXIF orientation.
    """

    input_size: Sequence[int]
    mean: Sequence[float]
    std: Sequence[float]
    interpolation: str = "bicubic"
    crop_pct: float = 0.875
    crop_mode: str = "center"
    resize_size: Sequence[int] | None = None
    color: str = "RGB"
    exif: bool = False

    def __post_init__(self) -> None:
        if len(self.input_size) != 3 or min(self.input_size) < 1:
            raise ValueError(f"input_size must be (channels, height, width), got {self.input_size!r}")
        if self.interpolation not in RESAMPLE:
            raise ValueError(f"interpolation must be one of {', '.join(RESAMPLE)}, got {self.interpolation!r}")
        if self.crop_mode not in CROP_MODES:
            raise ValueError(f"crop_mode must be one of {', '.join(CROP_MODES)}, got {self.crop_mode!r}")
        if not 0 < self.crop_pct < math.inf or not all(0 < value < math.inf for value in self.std):
            raise ValueError(f"crop_pct and std must be above 0 and finite, got {self.crop_pct!r} and {self.std!r}")
        if self.resize_size is not None and (len(self.resize_size) != 2 or min(self.resize_size) < 1):
            raise ValueError(f"resize_size must be (height, width), got {self.resize_size!r}")
        if self.color not in (UNKNOWN, "", COLORS.get(self.input_size[0])):
            raise ValueError(f"the color {self.color!r} does not fit {self.input_size[0]} channels")
        if not len(self.mean) == len(self.std) == (0 if self.color == UNKNOWN else self.input_size[0]):
            raise ValueError(f"mean and std need one value per channel: {self.mean!r}, {self.std!r}")

    @property
    def scale_size(self) -> tuple[int, int]:
        """Target height and width of the resize step, which comes before the crop."""
        if self.resize_size is not None:
            return int(self.resize_size[0]), int(self.resize_size[1])
        return math.floor(self.input_size[1] / self.crop_pct), math.floor(self.input_size[2] / self.crop_pct)

    def check_known(self) -> None:
        """If mean and standard deviation are unknown, raise :class:`ModelFileError`: images cannot be normalized."""
        if self.color == UNKNOWN:
            raise ModelFileError(
                "the preprocessing of images is unknown: the file has no mean and standard deviation. Export it "
                "again with both (data_config, --mean and --std), or pass arrays to Predictor.run"
            )

    def pixels(self, image: Image.Image) -> np.ndarray:
        """Convert an 8-bit image to RGB or gray, resize the image, and crop the center.

        Return uint8 [height, width, channels], with the height and width in ``input_size``.

        Raises:
            ImageError: the model has neither 1 nor 3 channels, the colors of the image cannot be converted, or the
                image is too narrow to be resized.
        """
        self.check_known()
        if self.color not in COLORS.values():
            raise ImageError(f"the model takes {self.input_size[0]} channels: pass arrays to Predictor.run")
        resized = self._resize(_convert(image, self.color))
        fill = tuple(round(255 * v) for v in self.mean) if self.crop_mode == "border" else (0,) * len(self.mean)
        array = np.asarray(_center(resized, self.input_size[1], self.input_size[2], fill), dtype=np.uint8)
        return array if array.ndim == 3 else array[..., None]

    def normalize(self, pixels: np.ndarray) -> np.ndarray:
        """Return (pixels / 255 - mean) / std.

        Shape: uint8 [batch, height, width, channels] -> float32 [batch, channels, height, width].
        """
        self.check_known()
        out = np.empty((len(pixels), *(pixels.shape[i] for i in (3, 1, 2))), np.float32)
        for channel, values in enumerate(self._values):
            np.take(values, pixels[..., channel], out=out[:, channel], mode="clip")
        return out

    @cached_property
    def _values(self) -> np.ndarray:
        # the normalized value of each of the 256 pixel values [channels, 256]; a look-up is faster than arithmetic
        x = np.arange(256, dtype=np.float32) / np.float32(255)
        return (x - np.asarray(self.mean, np.float32)[:, None]) / np.asarray(self.std, np.float32)[:, None]

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Return (height, width) after the resize step, for an image of ``height`` x ``width`` pixels."""
        scale_h, scale_w = self.scale_size
        if self.crop_mode == "squash":
            size = scale_h, scale_w
        elif self.crop_mode == "border" or scale_h != scale_w:
            # border: the longest edge gets the target size; center and not square: the shortest edge does
            pick = max if self.crop_mode == "border" else min
            ratio = pick(height / scale_h, width / scale_w)
            size = round(height / ratio), round(width / ratio)
        elif height <= width:
            size = scale_h, int(scale_h * width / height)
        else:
            size = int(scale_h * height / width), scale_h
        return max(1, size[0]), max(1, size[1])

    def _resize(self, image: Image.Image) -> Image.Image:
        height, width = self.resized(image.height, image.width)
        if height * width > max(MAX_PIXELS, image.height * image.width):
            raise ImageTooLargeError(
                f"the image of {image.width} x {image.height} pixels becomes {width} x {height} pixels by resizing; "
                f"the limit is {MAX_PIXELS} pixels"
            )
        same = (height, width) == (image.height, image.width)
        return image if same else image.resize((width, height), RESAMPLE[self.interpolation])


def _convert(image: Image.Image, color: str) -> Image.Image:
    if image.mode == "P" and isinstance(image.info.get("transparency"), bytes):
        image = image.convert("RGBA")  # the same pixels, without Pillow's warning
    try:
        return image if image.mode == color else image.convert(color)
    except (ValueError, OSError) as error:
        raise ImageError(f"the image's mode {image.mode} cannot be converted to {color}: {error}") from error


def _center(image: Image.Image, height: int, width: int, fill: tuple[int, ...]) -> Image.Image:
    """Crop the center. First pad a smaller image with the color ``fill``. Offsets are rounded as in torchvision."""
    more_h, more_w = max(0, height - image.height), max(0, width - image.width)
    if more_h or more_w:
        border = more_w // 2, more_h // 2, (more_w + 1) // 2, (more_h + 1) // 2
        image = ImageOps.expand(image, border, fill[0] if len(fill) == 1 else fill)
    top, left = round((image.height - height) / 2), round((image.width - width) / 2)
    return image.crop((left, top, left + width, top + height))


def _to_8_bit(image: Image.Image, name: str) -> Image.Image:
    """Convert an image with 16-bit, 32-bit or float pixels to 8 bits. Return any other image unchanged.

    If all values are floats from 0 to 1, the values are multiplied by 255. Otherwise, if all values are from 0 to 255,
    the values are rounded. Other values raise ImageError, because Pillow's conversion would clip such values.
    """
    if image.mode not in ("I", "F") and not image.mode.startswith("I;16"):
        return image
    values = np.asarray(image)
    low, high = float(values.min()), float(values.max())
    fractions = image.mode == "F" and low >= 0 and high <= 1
    if not (fractions or (low >= 0 and high <= 255)):  # NaN raises, too
        raise ImageError(
            f"{name} has values from {low:g} to {high:g} (mode {image.mode}), expected 0 to 255, or 0 to 1 as floats: "
            "convert it to 8 bits first"
        )
    return Image.fromarray(np.rint(values * 255.0 if fractions else values).astype(np.uint8))


def read_image(source: Any, *, max_pixels: int = MAX_PIXELS, exif: bool = False) -> Image.Image:
    """Read and decode an image, and return a Pillow image.

    Args:
        source: a path, encoded bytes, a Pillow image, or a uint8 array [height, width] or [height, width, 1 or 3].
        max_pixels: an image with more pixels raises :class:`ImageTooLargeError` before the image is decoded. Arrays are
            not limited.
        exif: rotate the image as its EXIF orientation says.

    Raises:
        ImageError: the image is missing, truncated, too large, or of an unknown format. The message names the file.
    """
    if isinstance(source, np.ndarray):
        return _from_array(source)
    with _opened(source, max_pixels) as (image, name):
        image.load()
        return _to_8_bit(ImageOps.exif_transpose(image) if exif else image, name)


@contextmanager
def _opened(source: Any, max_pixels: int) -> Iterator[tuple[Image.Image, str]]:
    """Open an image without decoding it, and yield the image and its name. All errors become :class:`ImageError`."""
    name = "the image" if isinstance(source, bytes | Image.Image) else str(source)
    try:
        if isinstance(source, Image.Image):
            yield _within(source, name, max_pixels), name
            return
        if not isinstance(source, bytes):
            kind = stat.S_IFMT(os.stat(source).st_mode)
            if kind in (stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFBLK):
                raise ImageError(f"{name} is not a regular file")  # opening a FIFO would wait for a writer
        with io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as file:
            yield _within(Image.open(file, formats=FORMATS), name, max_pixels), name
    except ImageError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        # Pillow has a limit of its own, which is larger than the default of max_pixels
        raise ImageTooLargeError(f"{name} has more pixels than the limit of {max_pixels}") from error
    except FileNotFoundError as error:
        problem = "is a URL; download it first" if "://" in name else "does not exist"
        raise ImageError(f"{name} {problem}") from error
    except Image.UnidentifiedImageError as error:
        raise ImageError(f"{name} is not an image of a known format ({', '.join(FORMATS)})") from error
    except Exception as error:  # decoders raise OSError, SyntaxError, struct.error, zlib.error and more
        raise ImageError(f"{name} cannot be decoded: {error}") from error


def _within(image: Image.Image, name: str, max_pixels: int) -> Image.Image:
    if image.width * image.height > max_pixels:
        raise ImageTooLargeError(f"{name} has {image.width} x {image.height} pixels, the limit is {max_pixels}")
    if not image.width * image.height:
        raise ImageError(f"{name} has no pixels")
    return image


def _from_array(array: np.ndarray) -> Image.Image:
    known = (
        array.dtype == np.uint8 and array.size and (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (1, 3)))
    )
    if not known:
        raise ImageError(
            f"an image array must be uint8 [height, width] or [height, width, 3], got {array.dtype} {list(array.shape)}"
        )
    return Image.fromarray(array.squeeze(2) if array.shape[2:] == (1,) else array)
