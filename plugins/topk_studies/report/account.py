"""Write the verdicts on the papers' claims as Markdown, from ``summary.json``.

``python -m topk_studies.report.account DIR/summary.json docs/results/features.md``, with the ``--output`` of the
studies as ``DIR``, also writes the parts of the summary that it quotes beside the text, as
``docs/results/features.json``. A study that the summary lacks keeps its place and its results, so that one can be
renewed without the others.

A text that quotes numbers of a report holds them between ``<!-- claims -->`` and ``<!-- /claims -->``; this writes them
there, so that they are the report's. Between ``<!-- open -->`` and ``<!-- /open -->`` it writes what the open claims
would take.
"""

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from topk_studies.report import undecided

BLOCK = re.compile(r"(?<=<!-- claims -->\n).*?(?=<!-- /claims -->)", re.DOTALL)
QUOTED = ("study", "title", "data", "command", "runs", "failed", "seconds", "notes")
# studies of which tables are quoted too, by their titles
WITH_TABLES = {
    "tau": ("Accuracy by tau: top-5", "Accuracy by tau: top-1", "Beyond accuracy"),
    "several-labels": ("Several labels an image", "What tuning chose"),
    "rare-classes": ("Accuracy on a long tail",),
    "small-sets": ("Prediction sets", "What tuning chose"),
}
VERDICTS = {"agrees": "agrees", "differs": "**differs**", "same": "no difference", "open": "open", "none": "none"}
COLUMNS = ("claim", "the paper", "ours", "verdict", "study")
DIFFERENCE = re.compile(r": [+-][0-9.]+( ± [0-9.]+)? (points|classes) \(\d+ seeds?\b")


def claims(summaries: Sequence[Mapping[str, Any]]) -> str:
    """Every claim in one table, after a sentence that counts the verdicts; then the studies with their commands."""
    notes = [(summary, note) for summary in summaries for note in summary["notes"]]
    rows = [COLUMNS, ("---",) * len(COLUMNS), *(_row(summary, note) for summary, note in notes)]
    table = [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join([_counted(note for _, note in notes), "", *table, "", *map(_study, summaries), ""])


def update(text: str, summaries: Sequence[Mapping[str, Any]]) -> str:
    """A text with its block of claims written anew, and that of open claims where it has one."""
    if not BLOCK.search(text):
        raise ValueError("the text has no <!-- claims --> and <!-- /claims --> on lines of their own")
    text = undecided.BLOCK.sub(lambda _: undecided.table(summaries), text)
    return BLOCK.sub(lambda _: claims(summaries), text)


def quoted(summaries: Sequence[Mapping[str, Any]]) -> str:
    """The parts of a summary that a text quotes, as JSON with one line a study."""
    return "[\n" + ",\n".join(json.dumps(_quoted(summary)) for summary in summaries) + "\n]\n"


def renewed(before: Sequence[Mapping[str, Any]], summaries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The studies of before, those of the summaries in their places, and what is new behind."""
    new = {summary["study"]: summary for summary in summaries}
    known = [new.pop(summary["study"], summary) for summary in before]
    return [*known, *new.values()]


def _quoted(summary: Mapping[str, Any]) -> dict[str, Any]:
    parts = {name: summary.get(name, "") for name in QUOTED}
    titles = WITH_TABLES.get(summary["study"], ())
    tables = [table for table in summary["tables"] if table["title"] in titles] if titles else []
    return {**parts, "tables": tables} if titles else parts


def _counted(notes: Iterable[Mapping[str, Any]]) -> str:
    verdicts = [note["verdict"] for note in notes]
    agree, differ, same, left = map(verdicts.count, ("agrees", "differs", "same", "open"))
    return (
        f"Of {len(verdicts)} claims {agree} agree with the runs, {differ} differ, {same} show no difference that "
        f"matters, and {left} stay open."
    )


def _row(summary: Mapping[str, Any], note: Mapping[str, Any]) -> tuple[str, ...]:
    """A claim; the evidence of a difference is what was compared, then its number with the interval."""
    compared, _, number = note["evidence"].partition(": ") if DIFFERENCE.search(note["evidence"]) else ("", "", "")
    claim = f"{note['claim']} *{compared}*" if compared else note["claim"]
    ours = number or note["evidence"]
    return claim, note.get("paper", ""), ours, VERDICTS[note["verdict"]], f"{summary['study']}{_data(summary)}"


def _data(summary: Mapping[str, Any]) -> str:
    return f", `{summary['data']}`" if summary.get("data") else ""


def _study(summary: Mapping[str, Any]) -> str:
    failed = f", {summary['failed']} failed" if summary["failed"] else ""
    size = f"{summary['runs']} runs{failed}, {_minutes(summary['seconds'])}"
    return f"- {summary['title']}: `{summary['command']}`, {size}."


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes of runs" if seconds >= 90 else f"{seconds:.0f} s of runs"


def main(argv: Sequence[str]) -> int:
    if len(argv) != 2:
        print("usage: python -m topk_studies.report.account SUMMARY.json TEXT.md", file=sys.stderr)
        return 2
    summary, path = map(Path, argv)
    results = path.with_suffix(".json")
    before = json.loads(results.read_text(encoding="utf-8")) if results.exists() else []
    summaries = renewed(before, json.loads(summary.read_text(encoding="utf-8")))
    path.write_text(update(path.read_text(encoding="utf-8"), summaries), "utf-8")
    results.write_text(quoted(summaries), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
