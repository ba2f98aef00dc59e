"""``topk-registry losses``, ``datasets`` and ``loggers``: registered names, from metadata and source files alone."""

import json
import shutil
import sys
import textwrap
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from topk_registry import registry
from topk_registry.cli import ArgumentParser
from topk_registry.registry.options import check_options
from topk_registry.registry.timm_losses import ONLY_K_HOT

_HEADER = ("NAME", "FROM", "STATUS", "SUMMARY")
_ONE, _SEVERAL = "one", "several"  # labels an image that a loss trains on
_STEP = 4  # columns that a summary below the others is moved in by
_READABLE = 40  # columns that a wrapped summary needs beside the others


def main(argv: Sequence[str]) -> int:
    """List the registered losses, or say why one is broken."""
    parser = _parser("losses")
    parser.add_argument(
        "--k-hot", action="store_true", help="only losses of k-hot targets, for timm train --task multilabel"
    )
    args = parser.parse_args(argv)
    if args.why:
        return _why(args.why)
    infos = registry.losses.infos(args.filter, exclude=args.exclude)
    if args.k_hot:
        infos = [info for info in infos if registry.takes_k_hot(info.name)]
    if args.json:
        known = [{**asdict(info), "takes_k_hot": registry.takes_k_hot(info.name)} for info in infos]
        print(json.dumps(known, indent=2))
    elif infos:
        rows = [(*_row(info)[:-1], _labels(info.name), _row(info)[-1]) for info in infos]
        _print_table([(*_HEADER[:-1], "LABELS", _HEADER[-1]), *rows])
    else:
        _say_none(registry.losses, args)
    return 0 if infos else 1


def loggers(argv: Sequence[str]) -> int:
    """List the loggers of `timm train --logger`, or say why one is broken."""
    return _list_or_import("loggers", registry.loggers, argv)


def datasets(argv: Sequence[str]) -> int:
    """List the data sets of `timm train --dataset topk/NAME`, or say why one is broken."""
    return _list_or_import("datasets", registry.datasets, argv)


def _list_or_import(what: str, names: registry.Registry, argv: Sequence[str]) -> int:
    args = _parser(what).parse_args(argv)
    if not args.why:
        return _list(names, args)
    names.builder(args.why)  # the command line prints what is wrong, with its cause
    print(f"{names.describe(args.why)} imports")
    return 0


def _list(names: registry.Registry, args: Any) -> int:
    infos = names.infos(args.filter, exclude=args.exclude)
    if args.json:
        print(json.dumps([asdict(info) for info in infos], indent=2))
    elif infos:
        _print_table([_HEADER, *map(_row, infos)])
    else:
        _say_none(names, args)
    return 0 if infos else 1


def _say_none(names: registry.Registry, args: Any) -> None:
    wider = f"; '*{args.filter[0]}*' matches inside names" if args.filter and "*" not in args.filter[0] else ""
    print(f"no {names.kind} matches{wider}", file=sys.stderr)


def _labels(name: str) -> str:
    """The labels an image that a loss trains on: one, several, or either."""
    if not registry.takes_k_hot(name):
        return _ONE
    return _SEVERAL if name in ONLY_K_HOT else f"{_ONE}, {_SEVERAL}"


def _parser(what: str) -> ArgumentParser:
    parser = ArgumentParser(
        prog=f"topk-registry {what}",
        description=f"List the registered {what}. Nothing is imported, so a plug-in that fails only on import is not "
        "known to be broken; --why imports it, which runs its code.",
    )
    parser.add_argument("filter", nargs="*", help="wildcards over names, as in '*hinge*', or distribution:name")
    parser.add_argument("--exclude", action="append", default=[], metavar="WILDCARD", help="names to leave out")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print everything that is known, for programs")
    output.add_argument("--why", metavar="NAME", help="import this one and print the full error if it is broken")
    return parser


def _row(info: registry.LossInfo) -> tuple[str, ...]:
    return info.name, f"{info.distribution} {info.version}".strip() or "-", info.status, info.error or info.summary


def _print_table(rows: list[tuple[str, ...]]) -> None:
    """Print rows in columns; a terminal gets the last column wrapped, below the others where it is narrow."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    indent = sum(widths[:-1]) + 2 * len(widths[:-1])
    limit = shutil.get_terminal_size().columns if sys.stdout.isatty() else indent + widths[-1]
    below = limit - indent < min(_READABLE, widths[-1])
    for row in rows:
        head = "  ".join(cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False))
        lines = textwrap.wrap(row[-1], limit - (_STEP if below else indent), break_on_hyphens=False)
        if below:
            print("\n".join([head.rstrip(), *(" " * _STEP + line for line in lines)]))
        else:
            first, *rest = lines or [""]
            print("\n".join([f"{head}  {first}".rstrip(), *(" " * indent + line for line in rest)]))


def _why(name: str) -> int:
    build = registry.losses.builder(name)  # the command line prints what is wrong, with its cause
    info = registry.loss_info(name)
    status = 0
    try:
        check_options(f"loss {name!r}", build, ())
    except TypeError as needs:
        state = f"it imports, and is not built here: {needs}"
    else:
        try:
            registry.create_loss(name)
            state = "it imports and builds"
        except (TypeError, ValueError) as error:  # a factory's own complaint, which may be a fault of its own
            traceback.print_exception(error)
            state, status = f"it imports, and does not build without options: {type(error).__name__}: {error}", 1
    print(f"{name} is {info.value} of {info.distribution or 'this process'} {info.version}".rstrip() + f"; {state}")
    return status
