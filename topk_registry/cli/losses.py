"""The command ``topk-registry losses`` lists all losses without importing plug-ins, or describes one loss."""

import inspect
from collections.abc import Sequence

from topk_registry import registry
from topk_registry.cli import ArgumentParser
from topk_registry.registry.ranges import option_ranges
from topk_registry.registry.signatures import parameters, tuning_grid, unbound


def main(argv: Sequence[str]) -> int:
    """List the registered losses, or describe one loss and its options."""
    parser = ArgumentParser(
        prog="topk-registry losses",
        description="List the registered losses without importing them. With the name of one loss, import this loss "
        "and list its options with defaults, ranges and values to tune. If the import fails, print the error.",
    )
    parser.add_argument("name", nargs="*", help="one name, or wildcards such as '*hinge*' and 'distribution:*'")
    parser.add_argument("--exclude", action="append", default=[], metavar="WILDCARD", help="names to leave out")
    args = parser.parse_args(argv)
    if len(args.name) == 1 and not set(args.name[0]) & set("*?["):
        return _describe(args.name[0])
    infos = registry.losses.infos(args.name, exclude=args.exclude)
    if not infos:
        parser.error(f"no loss matches {' '.join(args.name)}")
    rows = [(i.name, f"{i.distribution} {i.version}".strip() or "-", i.status, i.error or i.summary) for i in infos]
    _print_table([("NAME", "FROM", "STATUS", "SUMMARY"), *rows])
    return 0


def _describe(name: str) -> int:
    factory = registry.get_loss_builder(name)
    info, ranges, grid = registry.loss_info(name), option_ranges(factory), tuning_grid(factory)
    rows = [("OPTION", "DEFAULT", "RANGE", "TUNING GRID")]
    for option, parameter in parameters(factory)[0].items():
        values = ranges.get(option, "")
        text = ", ".join(map(str, values)) if isinstance(values, tuple) else str(values)
        default = "required" if parameter.default is parameter.empty else str(parameter.default)
        rows.append((option, default, text, ", ".join(map(str, grid.get(option, ())))))
    print(f"{name} of {info.distribution or 'this process'} {info.version}".rstrip() + f" ({info.value})\n")
    print(f"{(info.summary if info.distribution == 'timm' else inspect.getdoc(unbound(factory))) or 'no docstring'}\n")
    _print_table(rows if len(rows) > 1 else [("The signature of this loss names no options.",)])
    return 0


def _print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
