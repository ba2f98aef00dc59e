"""Functions that several commands use: error messages, output to the terminal, and flags."""

import argparse
import functools
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence

from topk_export.errors import DeviceError, ExportError, PredictionError, VerificationError, printable
from topk_export.runtime.session import DEVICES
from topk_registry.cli import INTERRUPTED, positive, words_of

EXPECTED = (ExportError, PredictionError, DeviceError, ImportError, ValueError, OSError)


def command(main: Callable[[Sequence[str]], int]) -> Callable[[Sequence[str]], int]:
    """Wrap the main function of a command, so that errors and warnings become short messages on stderr.

    The wrapper catches the exceptions in ``EXPECTED``, prints ``error: MESSAGE``, and returns the exit status 2. For a
    :class:`VerificationError`, the exit status is 1. After Ctrl-C, the exit status is 130. The wrapper prints a warning
    as ``warning: MESSAGE``.
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
    """Print a message on stderr. Escape all control characters except line breaks."""
    print("\n".join(map(printable, message.split("\n"))), file=sys.stderr, flush=True)


def timed(tell: Callable[[str], object]) -> Callable[[str], None]:
    """Return a function that passes lines of text to ``tell``, each with the seconds since the first line."""
    start = time.perf_counter()

    def line(text: str) -> None:
        tell(f"{time.perf_counter() - start:5.1f} s  {text}")

    return line


def add_runtime_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags ``--device``, ``--require-gpu`` and ``--threads`` to a parser."""
    add = parser.add_argument
    add("--device", choices=DEVICES, default="auto", help="device that runs the model (default: a GPU if there is one)")
    add("--require-gpu", action="store_true", help="exit with an error if the model does not run on a GPU")
    add("--threads", type=positive, metavar="N", help="number of CPU threads that run the model")
