"""The default of tau, from the results of the study of it on both data sets.

The default is the value whose largest shortfall is the smallest. A shortfall is how far its mean top-5 accuracy lies
below the best of its row. A value is out that is behind cross-entropy on clean labels, with intervals that do not meet.

``python -m topk_studies.report.tau DIR docs/results/tau_images.json`` collects the runs that several commands of the
study left in one folder.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topk_studies.engine.store import Store
from topk_studies.engine.study import Record
from topk_studies.report.account import quoted
from topk_studies.report.output import read_section, summary_of

BASELINE = "ce"
WORDS = {"features": "feature vectors", "tau_images": "images"}  # files of results, and the data that each is of

Results = Mapping[str, Sequence[Mapping[str, Any]]]  # by file, the studies in it
Number = Mapping[str, Any]  # an estimate: mean, half_width and count


@dataclass(frozen=True)
class Condition:
    """A row of the study: top-5 and top-1 accuracy of each value and of cross-entropy, where that was run."""

    data: str
    network: str
    noise: str
    top5: dict[str, Number]
    top1: dict[str, Number]

    @property
    def means(self) -> dict[str, float]:
        """Top-5 accuracy by value of tau."""
        return {name: number["mean"] for name, number in self.top5.items() if name != BASELINE}

    @property
    def seeds(self) -> str:
        counts = sorted({number["count"] for number in self.top5.values()})
        return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def conditions(results: Results) -> list[Condition]:
    """The rows of both data sets that have every value."""
    all_rows: list[Condition] = []
    for file, words in WORDS.items():
        for study in results[file]:
            if study["study"] == "tau":
                all_rows += [_condition(words, *rows) for rows in zip(*map(_rows, study["tables"][:2]), strict=True)]
    values = {value for row in all_rows for value in row.means}
    return [row for row in all_rows if set(row.means) == values]


def shortfalls(rows: Sequence[Condition]) -> dict[str, list[float]]:
    """By value, how far it lies below the best value of each row, in points."""
    values = rows[0].means
    return {value: [max(row.means.values()) - row.means[value] for row in rows] for value in values}


def behind(rows: Sequence[Condition]) -> set[str]:
    """Values that lie below cross-entropy on clean labels somewhere, with intervals that do not meet."""
    clean = [row for row in rows if float(row.noise) == 0.0 and BASELINE in row.top5]
    return {value for row in clean for value in row.means if _high(row.top5[value]) < _low(row.top5[BASELINE])}


def chosen(rows: Sequence[Condition]) -> str:
    """The value that the rule chooses."""
    out = behind(rows)
    worst = {value: max(each) for value, each in shortfalls(rows).items() if value not in out}
    return min(worst, key=lambda value: worst[value])


def table(rows: Sequence[Condition]) -> str:
    """The accuracies of every row: top-5 with its interval, and top-1 in brackets."""
    names = list(dict.fromkeys(name for row in rows for name in row.top5))
    head = [
        "data",
        "network",
        "label noise",
        "seeds",
        *("cross-entropy" if name == BASELINE else name for name in names),
    ]
    return _markdown(head, ([row.data, row.network, row.noise, row.seeds, *_cells(row, names)] for row in rows))


def summary(rows: Sequence[Condition]) -> str:
    """What the rule looks at, by value."""
    short, out, count = shortfalls(rows), behind(rows), len(rows)
    lines = [
        ["largest shortfall, points", *(f"{max(each):.1f}" for each in short.values())],
        ["mean shortfall, points", *(f"{sum(each) / count:.1f}" for each in short.values())],
        [f"best of its row, of {count}", *(str(each.count(0.0)) for each in short.values())],
        ["on clean labels behind cross-entropy", *("yes" if value in out else "no" for value in short)],
    ]
    return _markdown(["", *short], lines)


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ["---"] * len(head), *rows))


def _rows(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


def _condition(data: str, five: Mapping[str, Any], one: Mapping[str, Any]) -> Condition:
    (key, *_), names = five, [name for name, value in five.items() if isinstance(value, Mapping)]
    network, noise = five[key].split(", ")
    return Condition(data, network, noise, {name: five[name] for name in names}, {name: one[name] for name in names})


def _cells(row: Condition, names: Iterable[str]) -> Iterable[str]:
    for name in names:
        five, one = row.top5.get(name), row.top1.get(name)
        half = "" if five is None or five["half_width"] is None else f" ± {five['half_width']:.1f}"
        yield "-" if five is None or one is None else f"{five['mean']:.1f}{half} ({one['mean']:.1f})"


def _low(number: Number) -> float:
    return number["mean"] - (number["half_width"] or 0.0)


def _high(number: Number) -> float:
    return number["mean"] + (number["half_width"] or 0.0)


def _place(record: Record) -> tuple[Any, ...]:
    """The place of a run in the study: rows by noise and depth, cross-entropy first, then values and seeds."""
    flags = record.configuration["flags"]
    depth, value = flags.get("model_kwargs", {}).get("depth", 0), flags.get("loss_opt", {}).get("tau", 0.0)
    return flags.get("label_noise", 0.0), depth, value, flags["lr"], flags["seed"]


def main(argv: Sequence[str]) -> int:
    if len(argv) != 2:
        print("usage: python -m topk_studies.report.tau DIR RESULTS.json", file=sys.stderr)
        return 2
    folder, results = map(Path, argv)
    store = Store(folder)
    files = (path for path in (folder / "runs" / "train").glob("*.json") if not path.name.endswith(".failed.json"))
    records = sorted((Record(**json.loads(path.read_text(encoding="utf-8"))) for path in files), key=_place)
    store.write_study("tau", records, {"command": "topk-registry study tau"})
    section = read_section(store, "tau")
    assert section is not None
    results.write_text(quoted([summary_of(section)]), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
