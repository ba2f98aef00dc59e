"""Exceptions that this package raises, and functions for error messages."""

import re
from collections.abc import Iterator
from contextlib import contextmanager


class ExportError(RuntimeError):
    """The model cannot be exported to ONNX."""


class VerificationError(ExportError):
    """The exported ONNX file does not load, or the file fails a check of :func:`~topk_export.verify_file`."""


class ModelFileError(ValueError):
    """The ONNX file cannot be used.

    For example, the file is missing or damaged, :func:`~topk_export.export_onnx` did not write the file, or the file
    lacks an input or output that the called function needs.
    """


class ImageError(ValueError):
    """The image cannot be read. For example, the file is missing, truncated, too large, or of an unknown format."""


class ImageTooLargeError(ImageError):
    """The image has more pixels than the limit."""


class PredictionError(RuntimeError):
    """For one image, the model computed NaN or a logit of plus infinity."""


class DeviceError(RuntimeError):
    """The model does not run on the requested device."""


@contextmanager
def naming(file: object) -> Iterator[None]:
    """If the ``with`` block raises an OSError without a file name, raise the error again with the file name ``file``.

    For example, the error of a full disk has no file name.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or isinstance(error.filename, str | bytes):
            raise
        raise OSError(error.errno, error.strerror, str(file)) from error


def printable(text: str) -> str:
    """Escape all control characters, so that the text cannot change the state of a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def first_line(error: BaseException) -> str:
    """Return the first line of the message of an exception, without the escape codes that color text in a terminal.

    If the message is empty, return the name of the exception's class.
    """
    lines = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", str(error)).strip().splitlines()
    return lines[0] if lines else type(error).__name__
