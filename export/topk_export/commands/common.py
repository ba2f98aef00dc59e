"""Shared parts of the commands: one-line errors, safe terminal output, and flags of the runtime."""

import argparse
import functools
import os
import sys
import warnings
from collections.abc import Callable, Sequence

from topk_export.errors import DeviceError, ExportError, ImageError, ModelFileError, PredictionError, VerificationError
from topk_export.runtime.session import DEVICES
from topk_registry.cli import INTERRUPTED, positive, words_of

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
    """Return text with control characters escaped, because a file name may contain codes that change the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def add_runtime_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--device``, ``--require-gpu`` and ``--threads``."""
    add = parser.add_argument
    add("--device", choices=DEVICES, default="auto", help="device to run on (default: a GPU if there is one)")
    add("--require-gpu", action="store_true", help="exit with an error if the model does not run on a GPU")
    add("--threads", type=positive, metavar="N", help="CPU threads of a run")
