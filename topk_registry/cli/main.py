"""``topk-registry COMMAND ...``, also installed as ``timm``.

A command's module is imported only when the command runs, so that listing losses is as quick as reading metadata.
"""

import os
import sys
import traceback
from pathlib import Path

from topk_registry.cli.commands import DISTRIBUTION, commands, summaries
from topk_registry.cli.parser import INTERRUPTED
from topk_registry.registry.environment import installed_version
from topk_registry.registry.errors import BrokenPluginError, PluginError


def main(argv: list[str] | None = None) -> int:
    """Run one command. Its exit status is returned: 1 for a plug-in's error, 2 for a wrong command line, 130
    for Ctrl-C."""
    try:
        return _main(argv)
    except BrokenPipeError:  # the reader of a pipe, such as head, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:  # as while a command's modules are imported; later most commands end in their own words
        print(f"{_program()}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _main(argv: list[str] | None) -> int:
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name == "help" and rest:
        name, rest = rest[0], ["--help"]
    if name in ("-h", "--help", "help"):
        print(_help(), flush=True)
        return 0
    if name in ("-V", "--version"):
        print(", ".join(f"{name} {installed_version(name) or '(not installed)'}" for name in (DISTRIBUTION, "timm")))
        return 0
    try:
        command = commands.builder(name)
    except PluginError as error:
        return _fail(error, status=1 if isinstance(error, BrokenPluginError) else 2)
    try:
        return command(rest)
    except PluginError as error:
        return _fail(error, status=1)


def train() -> int:
    """Run ``topk-train ...``, which is ``topk-registry train ...``."""
    return main(["train", *sys.argv[1:]])


def _fail(error: PluginError, status: int) -> int:
    if error.__cause__ is not None:
        traceback.print_exception(error)
    else:
        print(f"{_program()}: {error}", file=sys.stderr)
    return status


def _help() -> str:
    return (
        f"usage: {_program()} COMMAND ...\n\nTop-k losses by name for timm and torchvision.\n\n{summaries()}\n\n"
        f"{_program()} COMMAND --help explains one; --version prints the versions"
    )


def _program() -> str:
    name = Path(sys.argv[0]).stem
    return "python -m topk_registry" if name == "__main__" else name
