"""Errors of export, of exported files and of prediction."""

from collections.abc import Iterator
from contextlib import contextmanager


class ExportError(RuntimeError):
    """The model cannot be exported, or the exported file failed its verification."""


class ModelFileError(ValueError):
    """The file is no ONNX model, or not one that this version can read."""


class ImageError(ValueError):
    """The image cannot be read: missing, truncated, too large, or of no known format."""


class ImageTooLargeError(ImageError):
    """The image has more pixels than are decoded."""


class PredictionError(RuntimeError):
    """The model's outputs for an image are not finite numbers."""


class DeviceError(RuntimeError):
    """The wanted device is not the one that the model runs on."""


class SourceError(ValueError):
    """A source of images cannot be read: missing, empty, broken, or of no known kind."""


class OutputError(ValueError):
    """The folder of scores holds others than those asked for."""


@contextmanager
def naming(file: object) -> Iterator[None]:
    """Name the file in an error of the system that names none, as on a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is None or isinstance(error.filename, str | bytes):
            raise
        raise OSError(error.errno, error.strerror, str(file)) from error
