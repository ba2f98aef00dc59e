"""``topk-predict COMMAND ...``: the commands that need no torch, where topk-registry itself is not installed."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

COMMANDS = {
    "predict": "top-k classes of images from an exported file",
    "score": "scores of many images, to Parquet files",
    "serve": "an exported file over HTTP",
    "bench": "time an exported file or a running service",
    "verify": "repeat the checks of an export",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; 2 for a wrong command line."""
    _warn_of_twins()
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in COMMANDS:
        return import_module(f"topk_export.commands.{name}").main(rest)
    if name in ("-h", "--help"):
        lines = "\n".join(f"  {command:<8}  {summary}" for command, summary in COMMANDS.items())
        print(f"usage: topk-predict COMMAND ...\n\ncommands:\n{lines}\n\ntopk-predict COMMAND --help explains one")
        return 0
    print(f"topk-predict: no command {name!r}; there are {', '.join(COMMANDS)}", file=sys.stderr)
    return 2


def _warn_of_twins() -> None:
    """Say where topk-registry is installed beside topk-predict: both hold these modules."""
    try:
        twins = [f"{name} {version(name)}" for name in ("topk-predict", "topk-registry")]
    except PackageNotFoundError:
        return
    print(
        f"warning: {' and '.join(twins)} install the same files, and removing one breaks the other: "
        "uninstall both, then install the one you want",
        file=sys.stderr,
    )
