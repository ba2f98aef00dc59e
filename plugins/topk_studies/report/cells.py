"""Text of a table's cells, and the best cell, if its interval is apart from all others."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias, TypeGuard

from topk_studies.engine.study import Estimate, Median, Table, Value

Cell: TypeAlias = tuple[int, int]  # (row, column)
Number: TypeAlias = int | float | Estimate | Median


def text(value: Value) -> str:
    """A value as it is read; what no number can be is said in words."""
    if value is None:
        return ""
    if isinstance(value, (bool, str)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}".replace(",", "\N{NARROW NO-BREAK SPACE}") if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else {math.inf: "inf", -math.inf: "-inf"}.get(value, "NaN")
    return str(value)


def duration(seconds: float) -> str:
    """Seconds, minutes or hours, whichever is read best."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def filled(table: Table) -> Table:
    """The table without the columns that are empty throughout."""
    used = [i for i in range(len(table.columns)) if any(row[i] not in (None, "") for row in table.rows)]
    columns = tuple(table.columns[i] for i in used)
    return replace(
        table,
        columns=columns,
        rows=tuple(tuple(row[i] for i in used) for row in table.rows),
        compared=tuple(name for name in table.compared if name in columns),
    )


def is_number(value: Value) -> TypeGuard[Number]:
    return isinstance(value, (int, float, Estimate, Median)) and not isinstance(value, bool)


def bounds(value: Number) -> tuple[float, float]:
    """(low, high) of what a number may be; NaN where one run leaves that open."""
    if isinstance(value, Median):
        return (value.low, value.high) if value.count > 1 else (math.nan, math.nan)
    if isinstance(value, Estimate):
        return value.low, value.high
    return float(value), float(value)


def best_cells(table: Table) -> set[Cell]:
    """The cells that are better than all that they compete with, their intervals apart."""
    return {winner for rivals in _rivals(table) if (winner := _winner(table, rivals)) is not None}


def _rivals(table: Table) -> Iterator[list[Cell]]:
    columns = [table.columns.index(name) for name in table.compared]
    cells = [[(row, column) for column in columns] for row in range(len(table.rows))]
    return iter(cells if table.along == "row" else [list(group) for group in zip(*cells, strict=True)])


def _winner(table: Table, cells: Sequence[Cell]) -> Cell | None:
    sign = 1 if table.best == "max" else -1
    ends = {
        (row, column): sorted(sign * end for end in bounds(value))
        for row, column in cells
        if is_number(value := table.rows[row][column])
    }
    if len(ends) < 2 or any(math.isnan(end) for pair in ends.values() for end in pair):
        return None  # without an interval nothing is settled
    first = max(ends, key=lambda cell: ends[cell][0])
    return first if all(ends[first][0] > high for cell, (_, high) in ends.items() if cell != first) else None
