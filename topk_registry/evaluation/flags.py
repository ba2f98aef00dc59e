"""Flags that the commands share, and errors as one line instead of a traceback."""

import argparse
import functools
import sys
from collections.abc import Callable, Sequence

from topk_registry.cli import INTERRUPTED, ParseOptions, positive, within, words_of
from topk_registry.folders.errors import FolderError
from topk_registry.train.errors import TrainError

EXPECTED = (TrainError, FolderError, ImportError, OSError, ValueError)
Main = Callable[[Sequence[str]], int]


def command(name: str) -> Callable[[Main], Main]:
    """Turn expected errors into ``topk-registry NAME: ...`` on stderr and exit status 2."""

    def of(main: Main) -> Main:
        @functools.wraps(main)
        def wrapped(argv: Sequence[str]) -> int:
            try:
                return main(argv)
            except BrokenPipeError:  # which the command line answers
                raise
            except EXPECTED as error:
                print(f"topk-registry {name}: {words_of(error)}", file=sys.stderr)
                return 2
            except KeyboardInterrupt as error:
                # folds that were trained are kept all the same, and have a cause
                lost = "--no-cache" in argv and error.__cause__ is None
                told = "starts anew, as --no-cache keeps no scores" if lost else "goes on where it stopped"
                print(f"topk-registry {name}: interrupted; the same command {told}", file=sys.stderr)
                return INTERRUPTED

        return wrapped

    return of


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which images are read, how models run, and where findings go."""
    data = parser.add_argument_group("images, from neither training nor the choice of the model")
    add = data.add_argument
    add("--data-dir", metavar="DIR", help="a folder with one folder a class (default: the first checkpoint's data)")
    add("--dataset", metavar="NAME", help="a data set as timm train takes it")
    add("--dataset-opt", nargs="*", action=ParseOptions, metavar="K=V", help="options of a registered data set")
    add("--split", dest="val_split", metavar="NAME", help="split of the data (default: validation)")
    add("--class-map", metavar="FILE", help="a file that maps class names to indices")
    add("--input-key", metavar="NAME", help="the data set's key of the image")
    add("--target-key", metavar="NAME", help="the data set's key of the label")
    add(
        "--ignore-unknown-classes",
        action="store_const",
        const=True,
        help="leave images out whose class the model lacks (default: refuse them)",
    )
    run = parser.add_argument_group("how models run")
    run.add_argument("--device", default="auto", metavar="NAME", help="device (default: cuda, or cpu without it)")
    run.add_argument("-b", "--batch-size", type=positive, default=64, metavar="N", help="images a run (default: 64)")
    run.add_argument(
        "-j", "--workers", type=within("[0, inf)", int), metavar="N", help="processes or threads that read images"
    )
    run.add_argument("--use-ema", action="store_true", help="take a checkpoint's moving average of the weights")
    run.add_argument("--cache", metavar="DIR", help="folder of kept scores (default: ~/.cache/topk_registry/scores)")
    run.add_argument("--no-cache", action="store_true", help="keep no scores, and read none")
    out = parser.add_argument_group("findings")
    out.add_argument("--json", metavar="FILE", help="also write the findings as JSON")
    out.add_argument("--page", metavar="FILE", help="also write a page with plots and pictures")
