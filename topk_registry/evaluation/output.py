"""Findings to the terminal, to JSON, and to a page."""

import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from topk_registry.evaluation.images import Images
from topk_registry.pages import thumbnail, write_page


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells under their columns; columns of numbers are flush right."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    right = [all(_is_number(row[c]) for row in rows) for c in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        told = (
            cell.rjust(width) if flush else cell.ljust(width)
            for cell, width, flush in zip(cells, widths, right, strict=True)
        )
        return "  ".join(told).rstrip()

    return "\n".join(map(line, [columns, *rows]))


def thumbnails(images: Images) -> Callable[[int], str]:
    """Return what shows an image of a data set by its number, "" where it cannot."""

    def show(index: int) -> str:
        try:
            picture = images.picture(index)
        except OSError:  # it went since
            return ""
        return "" if picture is None else thumbnail(picture)

    return show


def write_findings(args: Any, findings: dict[str, Any], page: Callable[[], str]) -> None:
    """Write the files that ``--json`` and ``--page`` name, and say so."""
    if args.json:
        content = json.dumps(finite(findings), indent=2, ensure_ascii=False)
        write_page(Path(args.json), content + "\n")
        print(f"wrote {args.json}", file=sys.stderr)
    if args.page:
        write_page(Path(args.page), page())
        print(f"wrote {args.page}", file=sys.stderr)


def finite(value: Any) -> Any:
    """The value with None for numbers that JSON has not: NaN and infinities."""
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_number(text: str) -> bool:
    digits = text.removesuffix(" %").lstrip("+-").replace(".", "", 1).replace("e-", "", 1)
    return digits.isdigit() or text in ("-", "nan")
