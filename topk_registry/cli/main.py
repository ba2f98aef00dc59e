"""The command ``topk-registry COMMAND ...``. The command ``timm COMMAND ...`` is the same program."""

import os
import sys
from pathlib import Path

from topk_registry.cli import INTERRUPTED, places_of
from topk_registry.cli.commands import commands, summaries
from topk_registry.errors import BrokenPluginError, PluginError
from topk_registry.registry.discovery import OURS, installed_version


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the exit status: 0 for success, 1 for a failure, 2 for wrong usage, 130 after Ctrl-C.

    ``argv`` has the name of the command and its arguments. If ``argv`` is None, ``sys.argv[1:]`` is used.
    """
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    program = Path(sys.argv[0]).stem.replace("__main__", "python -m topk_registry")
    try:
        if name in ("-h", "--help"):
            usage = f"usage: {program} COMMAND ...\n\nTop-k losses by name for timm and torchvision."
            more = f"{program} COMMAND --help explains one command; --version prints the versions"
            print(f"{usage}\n\n{summaries()}\n\n{more}", flush=True)
            return 0
        if name in ("-V", "--version"):
            print(", ".join(f"{name} {installed_version(name) or '(not installed)'}" for name in (OURS, "timm")))
            return 0
        return commands.builder(name)(rest)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "timm", "torchvision"):
            raise
        print(f"{program}: {name} needs {error.name}, which is not installed", file=sys.stderr)
        return 2
    except PluginError as error:
        if isinstance(error.__cause__, ModuleNotFoundError) and error.__cause__.name in ("torch", "timm"):
            print(f"{program}: {name} needs {error.__cause__.name}, which is not installed", file=sys.stderr)
            return 2
        places = [] if error.__cause__ is None else places_of(error.__cause__)
        print("\n  at ".join([f"{program}: {error}", *places]), file=sys.stderr)
        return 1 if isinstance(error, BrokenPluginError) else 2
    except BrokenPipeError:  # the reader of the pipe, such as head, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return INTERRUPTED


def train() -> int:
    """Run the command ``topk-train ...``, which does the same as ``topk-registry train ...``."""
    return main(["train", *sys.argv[1:]])
