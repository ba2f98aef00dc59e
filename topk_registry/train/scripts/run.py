"""Run a user's own, unmodified copy of timm's or torchvision's training script, with ``--loss`` added to its flags."""

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from topk_registry import registry
from topk_registry.cli import ArgumentParser, ParseOptions
from topk_registry.train.errors import TrainError

ENVIRONMENT = "TIMM_TRAIN_SCRIPT"


def split_arguments(argv: Sequence[str], *, prog: str, flag: str) -> tuple[argparse.Namespace, list[str]]:
    """Split the arguments into ours (script, loss, loss_opt and, with a loss, class weights) and the script's own."""
    parser = ArgumentParser(prog=prog, add_help=False)
    parser.add_argument(flag, dest="script", default="", metavar="PATH")
    parser.add_argument("--loss", default="", metavar="NAME")
    parser.add_argument("--loss-opt", nargs="*", default={}, action=ParseOptions, metavar="K=V")
    ours, theirs = parser.parse_known_args(argv)
    if ours.loss:  # else timm's script keeps its own flags of these names
        parser.add_argument("--class-weight", "--loss-class-weight", default="", metavar="HOW")
        ours, theirs = parser.parse_known_args(argv)
    return ours, theirs


def run_timm(path: str, argv: Sequence[str], ours: argparse.Namespace) -> int:
    """Run timm's train.py through its module-level ``parser`` and ``main()``."""

    def go(module: ModuleType, prepare: Callable[[Any], None]) -> None:
        parser = _need(module, "parser", path)
        parse = parser.parse_args

        def parse_and_note(*args: Any, **kwargs: Any) -> Any:
            parsed = parse(*args, **kwargs)
            prepare(parsed)
            return parsed

        parser.parse_args = parse_and_note
        _need(module, "main", path)()

    return _run(path, argv, ours, go)


def run_torchvision(path: str, argv: Sequence[str], ours: argparse.Namespace) -> int:
    """Run torchvision's references/classification/train.py through ``get_args_parser()`` and ``main(args)``."""

    def go(module: ModuleType, prepare: Callable[[Any], None]) -> None:
        args = _need(module, "get_args_parser", path)().parse_args(list(argv))
        prepare(args)
        _need(module, "main", path)(args)

    return _run(path, argv, ours, go)


def _run(
    path: str,
    argv: Sequence[str],
    ours: argparse.Namespace,
    go: Callable[[ModuleType, Callable[[Any], None]], None],
) -> int:
    if not os.path.isfile(path):
        print(f"there is no training script {path}", file=sys.stderr)
        return 2
    if ours.loss:
        registry.get_loss_builder(ours.loss)  # an unknown name is an error before the script is loaded
    try:
        with _as_main(path, argv) as module:
            # after the script, which may come with a timm of its own
            from topk_registry.train.scripts.patch import Seam, enter

            if not ours.loss:  # nothing of ours to put in
                go(module, lambda args: None)
                return 0
            seam = Seam(ours.loss, ours.loss_opt, ours.class_weight)
            enter(module, seam)

            def prepare(args: Any) -> None:
                seam.args, seam.num_classes = args, getattr(args, "num_classes", None)
                args.loss_record = seam.record  # into the script's args.yaml and checkpoints

            with seam.tripwire():
                go(module, prepare)
    except TrainError as error:
        print(f"{Path(path).name}: {error}", file=sys.stderr)
        return 1
    return 0


@contextmanager
def _as_main(path: str, argv: Sequence[str]) -> Iterator[ModuleType]:
    """Load the script as a module with the command line and the import path that it would have if it were run."""
    outer = sys.argv, list(sys.path)
    sys.argv = [path, *argv]
    sys.path.insert(0, str(Path(path).resolve().parent))
    name = f"topk_registry_script_{Path(path).stem}"
    try:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise TrainError(f"{path} is not a Python script")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # so that its classes can be pickled
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.argv, sys.path[:] = outer
        sys.modules.pop(name, None)


def _need(module: ModuleType, name: str, path: str) -> Any:
    if not hasattr(module, name):
        raise TrainError(f"no {name} in {path}: is it timm's or torchvision's training script?")
    return getattr(module, name)
