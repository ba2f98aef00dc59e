"""The command line: ``topk-registry COMMAND ...``, also installed as ``timm``.

A command is a module with ``main(argv) -> int``, imported only when it is asked for, so that listing losses stays as
quick as reading metadata.
"""

import os
import sys
import traceback
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path

from topk_registry.registry.errors import PluginError

COMMANDS = {
    "train": ("topk_registry.train.command", "train an image classifier by the name of its loss"),
    "validate": ("topk_registry.train.validate", "evaluate a checkpoint or a pretrained model"),
    "torchvision-train": (
        "topk_registry.train.scripts.torchvision",
        "run torchvision's training script with a loss by name",
    ),
    "study": ("topk_studies.command", "repeat the papers' studies, on your data or on a built-in set"),
    "losses": ("topk_registry.cli.losses", "list the registered losses, or say why one is broken"),
    "check": ("topk_registry.cli.check", "run the conformance kit on a registered loss"),
    "export": ("topk_export.commands.export", "a trained classifier as one ONNX file with exact top-k probabilities"),
    "verify": ("topk_export.commands.verify", "repeat the checks of an exported file"),
    "predict": ("topk_export.commands.predict", "top-k classes of images from an exported file"),
    "serve": ("topk_export.commands.serve", "serve an exported file over HTTP"),
    "bench": ("topk_export.commands.bench", "time an exported file, and its head's share"),
    "doctor": ("topk_registry.cli.doctor", "versions, GPU, commands on PATH, broken plug-ins"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; the exit status is its own, 1 for a plug-in's error and 2 for a wrong command line."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in COMMANDS:
        return _run(COMMANDS[name][0], rest)
    if name in ("-h", "--help", "help"):
        print(_help())
        return 0
    if name in ("-V", "--version"):
        print(_version())
        return 0
    close = get_close_matches(name, COMMANDS, n=3, cutoff=0.4) or COMMANDS
    print(f"{_program()}: no command is called {name!r}; try {', '.join(close)} or --help", file=sys.stderr)
    return 2


def train() -> int:
    """``topk-train ...`` is ``topk-registry train ...``."""
    return main(["train", *sys.argv[1:]])


def _run(module: str, argv: list[str]) -> int:
    try:
        return import_module(module).main(argv)
    except PluginError as error:
        if error.__cause__ is not None:
            traceback.print_exception(error)
        else:
            print(f"{_program()}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of a pipe, such as head, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    head = f"usage: {_program()} COMMAND ...\n\nTop-k losses by name for timm and torchvision.\n\ncommands:\n"
    return head + "\n".join(lines) + f"\n\n{_program()} COMMAND --help explains one; --version prints the version"


def _version() -> str:
    from importlib.metadata import version

    return f"topk-registry {version('topk-registry')}"


def _program() -> str:
    name = Path(sys.argv[0]).stem
    return "python -m topk_registry" if name == "__main__" else name
