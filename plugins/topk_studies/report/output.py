"""Output of a folder of studies: tables in the terminal, CSV and JSON of every run."""

import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from topk_studies.engine.catalogue import PAPERS, STUDIES, load_study
from topk_studies.engine.store import Store, key_of, write_file, write_json
from topk_studies.engine.study import Estimate, Median, Record, Section, Table, Value
from topk_studies.engine.tuning import metric_of
from topk_studies.report.cells import filled, text


def write_data(store: Store) -> list[Section]:
    """``summary.json``, ``runs.csv`` and ``runs.json`` of a folder's records; returns what a page is made of."""
    sections = [section for name in STUDIES if (section := read_section(store, name)) is not None]
    runs = list(_with_studies(sections))
    write_json(store.root / "summary.json", [summary_of(section) for section in sections])
    write_json(store.root / "runs.json", [{"studies": names, **asdict(record)} for names, record in runs])
    write_file(store.root / "runs.csv", _csv(runs))
    return sections


def read_section(store: Store, name: str) -> Section | None:
    """A study as its cached records tell it; None where there are none."""
    stored = store.read_study(name)
    if stored is None:
        return None
    records, about = stored
    study = load_study(name)
    finished = tuple(record for record in records if not record.error)
    findings = study.report(finished)
    return Section(
        name=name,
        title=study.TITLE,
        question=study.QUESTION,
        reference=study.REFERENCE,
        findings=replace(findings, tables=tuple(filled(table) for table in findings.tables if table.rows)),
        records=finished,
        failed=tuple(record for record in records if record.error),
        command=about.get("command", ""),
    )


def summary_of(section: Section) -> dict[str, Any]:
    """A section as plain types, without its pictures."""
    findings = section.findings
    return {
        "study": section.name,
        "title": section.title,
        "reference": section.reference,
        "data": ", ".join(dict.fromkeys(filter(None, map(_data, section.records)))),
        "command": section.command,
        "runs": len(section.records),
        "failed": len(section.failed),
        "seconds": round(sum(record.seconds for record in section.records), 1),
        "protocol": findings.protocol,
        "tables": [_plain_table(table) for table in findings.tables],
        "notes": [asdict(note) for note in findings.notes],
    }


def _data(record: Record) -> str:
    """The data of a training run."""
    flags = record.configuration.get("flags", {})
    return flags.get("dataset") or flags.get("data_dir", "")


def print_section(section: Section) -> None:
    print(f"\n{section.title}: {section.question}\n({section.reference}; {len(section.records)} runs, "
          f"{sum(record.seconds for record in section.records):.0f} s in all)")  # fmt: skip
    for table in section.findings.tables:
        print(f"\n{table.title}\n{table_text(table)}")
    for note in section.findings.notes:
        beyond = ", beyond the paper" if note.beyond and section.name in PAPERS else ""
        verdict = "no verdict" if note.verdict == "none" else note.verdict
        print(f"\n[{verdict}{beyond}] {note.claim}\n  {note.told}")
    if section.failed:
        first = section.failed[0]
        print(f"\n{len(section.failed)} runs failed, the first is {json.dumps(first.configuration)}\n{first.error}")


def table_text(table: Table) -> str:
    """A table in aligned columns."""
    cells = [table.columns, *(tuple(map(text, row)) for row in table.rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    )


def _plain_table(table: Table) -> dict[str, Any]:
    rows = [[_plain(value) for value in row] for row in table.rows]
    return {"title": table.title, "columns": table.columns, "paper": table.paper, "rows": rows, "note": table.note}


def _plain(value: Value) -> Any:
    """JSON has no NaN: an interval or a number that is not there is null."""
    if isinstance(value, (Estimate, Median)):
        return {name: _plain(part) for name, part in asdict(value).items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _with_studies(sections: Sequence[Section]) -> Iterator[tuple[list[str], Record]]:
    """Every record once, with the names of the studies that it belongs to."""
    by_key: dict[str, tuple[list[str], Record]] = {}
    for section in sections:
        for record in (*section.records, *section.failed):
            names, _ = by_key.setdefault(f"{record.kind}/{key_of(record.version, record.configuration)}", ([], record))
            names.append(section.name)
    return iter(by_key.values())


def _csv(runs: Sequence[tuple[list[str], Record]]) -> str:
    """One line a run: its configuration, and the numbers of its result at the last step where they are a history."""
    rows = [
        {
            "studies": " ".join(names),
            "kind": record.kind,
            "seconds": record.seconds,
            "when": record.when,
            "error": record.error.strip().splitlines()[-1] if record.error else "",
            **_flat("", record.configuration),
            **_flat("result.", _scalars(record.result, metric_of([record]))),
        }
        for names, record in runs
    ]
    file = io.StringIO()
    # a column that no run has anything in, such as the error where none failed, is left out
    names = dict.fromkeys(name for row in rows for name, value in row.items() if value not in (None, ""))
    writer = csv.DictWriter(file, names, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def _flat(prefix: str, content: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(value, dict):
            flat |= _flat(f"{prefix}{name}.", value)
        else:
            flat[prefix + name] = json.dumps(value) if isinstance(value, list) else value
    return flat


def _scalars(result: dict[str, Any], metric: str) -> dict[str, Any]:
    history = result.get("history")
    if not history:
        return result
    rest = {name: value for name, value in result.items() if name != "history"}
    best = max(history, key=lambda row: row.get(metric, row["epoch"]))
    return {**rest, "epochs": len(history), "best": best, "last": history[-1]}
