"""The command ``timm run PATH ...`` runs a copy of timm's or torchvision's training script with a registered loss."""

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
from topk_registry.errors import TrainError

PROGRAM = "topk-registry run"
NO_SCRIPT = (
    "expected the path of a training script, timm's train.py or torchvision's references/classification/train.py; pip "
    "installs neither of them: take a copy from a checkout of the version that is installed"
)


def main(argv: Sequence[str]) -> int:
    """Run your copy of timm's or torchvision's training script with a loss by name."""
    parser = _parser()
    if argv and argv[0] in ("-h", "--help"):
        parser.print_help()
        return 0
    ours, theirs = parser.parse_known_args(argv)
    if not ours.script or not os.path.isfile(ours.script):
        parser.error(f"{NO_SCRIPT}, got {ours.script!r}")
    if ours.loss:
        registry.get_loss_builder(ours.loss)  # raises an error for an unknown name before the script is loaded
    elif ours.loss_opt or ours.class_weight:
        parser.error("--loss-opt and --class-weight need --loss NAME")
    try:
        _run(ours, theirs)
    except TrainError as error:
        print(f"{PROGRAM} {Path(ours.script).name}: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} PATH [--loss NAME] [--loss-opt K=V ...] [--class-weight HOW] ARGS...",
        description="Run an unmodified copy of timm's train.py or torchvision's references/classification/train.py "
        "with a registered loss instead of the script's loss. All other arguments are passed to the script. An "
        "optimizer step without a gradient of this loss ends the run with an error. Evaluation uses the script's loss.",
        add_help=False,
    )
    parser.add_argument("script", nargs="?", default="", metavar="PATH", help="the training script")
    parser.add_argument("--loss", default="", metavar="NAME", help="a name that `topk-registry losses` lists")
    parser.add_argument(
        "--loss-opt", nargs="*", default={}, action=ParseOptions, metavar="K=V", help="options of the loss"
    )
    parser.add_argument(
        "--class-weight", default="", metavar="HOW", help="inv_freq, effective_num, a file, or numbers with commas"
    )
    return parser


def _run(ours: argparse.Namespace, argv: Sequence[str]) -> None:
    with _loaded(ours.script, argv) as module:
        # These imports must follow the load of the script, because the script may add another copy of timm to the path.
        from topk_registry.train.posterize import allow_zero_bits
        from topk_registry.train.scripts.patch import Patch, install

        allow_zero_bits()
        if not ours.loss:
            _call(module, argv)
            return
        patch = Patch(ours.loss, ours.loss_opt, ours.class_weight)
        install(module, patch)
        with patch.check_steps():
            _call(module, argv, patch.note_arguments)


def _call(module: ModuleType, argv: Sequence[str], prepare: Callable[[Any], None] = lambda args: None) -> None:
    if hasattr(module, "get_args_parser") and hasattr(module, "main"):  # torchvision's script
        args = module.get_args_parser().parse_args(list(argv))
        prepare(args)
        module.main(args)
    elif hasattr(module, "parser") and hasattr(module, "main"):  # timm's script
        parse = module.parser.parse_args

        def parse_and_note(*args: Any, **kwargs: Any) -> Any:
            parsed = parse(*args, **kwargs)
            prepare(parsed)
            return parsed

        module.parser.parse_args = parse_and_note
        module.main()
    else:
        raise TrainError("expected timm's or torchvision's training script: it has no main() or no argument parser")


@contextmanager
def _loaded(path: str, argv: Sequence[str]) -> Iterator[ModuleType]:
    """Context manager that loads the script as a module, as if Python ran the script with these arguments."""
    outer = sys.argv, list(sys.path)
    sys.argv = [path, *argv]
    sys.path.insert(0, str(Path(path).resolve().parent))
    name = f"topk_registry_script_{Path(path).stem}"
    try:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise TrainError(f"{path} is not a Python script")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # pickle must find the module of a class
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.argv, sys.path[:] = outer
        sys.modules.pop(name, None)
