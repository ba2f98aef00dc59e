"""Shared by the commands: errors as one line, and what a terminal can be shown."""

import functools
import os
import sys
import warnings
from collections.abc import Callable, Sequence

from topk_export.errors import DeviceError, ExportError, ImageError, ModelFileError, PredictionError, VerificationError
from topk_registry.cli import INTERRUPTED, words_of

EXPECTED = (
    ExportError,
    ModelFileError,
    ImageError,
    PredictionError,
    DeviceError,
    ImportError,
    ValueError,
    OSError,
)


def command(main: Callable[[Sequence[str]], int]) -> Callable[[Sequence[str]], int]:
    """Print expected errors as ``error: ...`` on stderr and warnings as one line each.

    The exit status is 2 for bad usage or input, and 1 for a failed check.
    """

    @functools.wraps(main)
    def wrapped(argv: Sequence[str]) -> int:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: say(f"warning: {message}")
            try:
                return main(argv)
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return 1
            except EXPECTED as error:
                say(f"error: {words_of(error)}")
                return 1 if isinstance(error, VerificationError) else 2
            except KeyboardInterrupt:
                say("interrupted")
                return INTERRUPTED

    return wrapped


def say(message: str) -> None:
    """Print a line to stderr."""
    print(printable(message), file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """Return text with control characters escaped: a file name may contain codes that change the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
