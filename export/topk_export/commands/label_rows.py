"""Rows that ``topk-registry predict`` prints for a file of several labels."""

import csv
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from topk_export.runtime.ranking import Ranked
from topk_export.runtime.several import LabelPrediction, ProbableClass

Result = tuple[Path, LabelPrediction | Exception]
HEADER = ("file", "rank", "index", "class", "probability", "in_top_k", "chosen", "in_set")


def write_label_table(results: Iterable[Result]) -> int:
    """Print the best classes, the chosen ones and the set of each image; return the number of errors."""
    bad = 0
    for path, item in results:
        if isinstance(item, Exception):
            bad += 1
            continue
        print(f"{path}\n  probability   class")
        for ranked in item.top:
            print(f"  {ranked.probability:11.4f}   {ranked.name}")
        if item.labels is not None:
            print(f"  labels: {names_of(item.labels, len(item.labels)) or 'none'}")
        if item.set is not None:
            print(f"  set of {item.set_size}: {names_of(item.set, item.set_size) or 'none'}")
    return bad


def names_of(chosen: Sequence[ProbableClass | Ranked], size: int | None) -> str:
    """The names of the classes that are given of a set, and dots where the set has more."""
    return ", ".join(ranked.name for ranked in chosen) + ("" if len(chosen) == size else ", ...")


def write_label_csv(results: Iterable[Result]) -> int:
    """Print a line for each class that is among the best, chosen, or in the set; return the number of errors."""
    bad = 0
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(HEADER)
    for path, item in results:
        if isinstance(item, Exception):
            bad += 1
            continue
        kinds = (item.top, item.labels, item.set)
        rows = {row.index: row for kind in kinds for row in kind or ()}
        for rank, row in enumerate(sorted(rows.values(), key=lambda row: -row.probability), 1):
            inside = ("" if kind is None else int(row in kind) for kind in kinds)
            writer.writerow((path, rank, row.index, row.name, f"{row.probability:.9g}", *inside))
    return bad
