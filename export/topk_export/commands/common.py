"""Shared by the commands: flags of the runtime, and errors as one line instead of a traceback."""

import argparse
import functools
import os
import sys
import warnings
from collections.abc import Callable, Sequence

from topk_export.errors import DeviceError, ExportError, ImageError, ModelFileError, PredictionError
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
    """Turn expected errors into ``error: ...`` on stderr and exit status 1, and warnings into one line each."""

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
                return 1
            except KeyboardInterrupt:
                say("interrupted")
                return INTERRUPTED

    return wrapped


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def add_runtime_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        choices=DEVICES,
        default="auto",
        help="where to run (default: CUDA where there is a GPU, else the CPU)",
    )
    parser.add_argument("--require-gpu", action="store_true", help="fail rather than run on the CPU")
    parser.add_argument("--threads", type=positive, metavar="N", help="CPU threads of one run")
