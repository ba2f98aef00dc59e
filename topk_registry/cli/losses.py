"""``topk-registry losses``: list losses from metadata and source files, or import one loss and describe it."""

import inspect
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from topk_registry import registry
from topk_registry.cli.parser import ArgumentParser
from topk_registry.registry.options import parameters, unbound
from topk_registry.registry.ranges import option_ranges


def main(argv: Sequence[str]) -> int:
    """List the registered losses, or the options of one."""
    parser = ArgumentParser(
        prog="topk-registry losses",
        description="List the registered losses without importing them. With the name of one loss, import it and list "
        "its options with their defaults and ranges, or print why it is broken.",
    )
    parser.add_argument("name", nargs="*", help="one name, or wildcards such as '*hinge*' and 'distribution:*'")
    parser.add_argument("--exclude", action="append", default=[], metavar="WILDCARD", help="names to leave out")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    if len(args.name) == 1 and not set(args.name[0]) & set("*?["):
        return _describe(args.name[0], as_json=args.json)
    infos = registry.losses.infos(args.name, exclude=args.exclude)
    if args.json:
        print(json.dumps([asdict(info) for info in infos], indent=2))
    elif infos:
        rows = [(i.name, f"{i.distribution} {i.version}".strip() or "-", i.status, i.error or i.summary) for i in infos]
        _print_table([("NAME", "FROM", "STATUS", "SUMMARY"), *rows])
    else:
        print("topk-registry losses: no loss matches", file=sys.stderr)
    return 0 if infos else 1


def _describe(name: str, *, as_json: bool) -> int:
    factory = registry.get_loss_builder(name)
    info, ranges = registry.loss_info(name), option_ranges(factory)
    options = []
    for option, parameter in parameters(factory)[0].items():
        default = parameter.default if isinstance(parameter.default, (bool, int, float)) else str(parameter.default)
        values = ranges.get(option, "")
        text = ", ".join(map(str, values)) if isinstance(values, tuple) else str(values)
        default = "required" if parameter.default is parameter.empty else default
        options.append({"name": option, "default": default, "range": text})
    if as_json:
        print(json.dumps({**asdict(info), "takes_k_hot": registry.takes_k_hot(name), "options": options}, indent=2))
        return 0
    print(f"{name} of {info.distribution or 'this process'} {info.version}".rstrip() + f" ({info.value})\n")
    print(f"{(info.summary if info.status == 'timm' else inspect.getdoc(unbound(factory))) or 'no docstring'}\n")
    _print_table([("OPTION", "DEFAULT", "RANGE"), *((o["name"], str(o["default"]), o["range"]) for o in options)])
    return 0


def _print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
