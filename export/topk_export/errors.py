"""Errors of export, of exported files and of prediction."""

import re
from collections.abc import Iterator
from contextlib import contextmanager


class ExportError(RuntimeError):
    """The model cannot be exported."""


class VerificationError(ExportError):
    """The exported file failed its verification."""


class ModelFileError(ValueError):
    """The file is not an ONNX model, or it is an ONNX model that this version cannot read."""


class ImageError(ValueError):
    """The image cannot be read: the file is missing, truncated, too large, or of an unknown format."""


class ImageTooLargeError(ImageError):
    """The image has more pixels than the limit."""


class PredictionError(RuntimeError):
    """The model's outputs for an image are not finite numbers."""


class DeviceError(RuntimeError):
    """The model does not run on the requested device."""


@contextmanager
def naming(file: object) -> Iterator[None]:
    """Add the file name to an OSError without a file name, such as the error of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is None or isinstance(error.filename, str | bytes):
            raise
        raise OSError(error.errno, error.strerror, str(file)) from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, without terminal codes."""
    lines = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", str(error)).strip().splitlines()
    return lines[0] if lines else type(error).__name__
