"""Write the verdicts on the papers' claims as Markdown, from ``summary.json``.

``python -m topk_studies.report.account DIR/summary.json docs/results/studies.md``, with the ``--output`` of the studies
as ``DIR``, also writes the parts of the summary that it quotes beside the text, as ``docs/results/studies.json``.

A text that quotes numbers of a report holds them between ``<!-- claims -->`` and ``<!-- /claims -->``; this writes them
there, so that they are the report's.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"(?<=<!-- claims -->\n).*?(?=<!-- /claims -->)", re.DOTALL)
QUOTED = ("study", "title", "command", "runs", "failed", "seconds", "notes")
VERDICTS = {"agrees": "agrees", "differs": "**differs**", "same": "no difference", "open": "open"}


def claims(summaries: Sequence[Mapping[str, Any]]) -> str:
    """Every study's claims and what its runs say of them, one table a study."""
    return "\n".join(map(_study, summaries))


def update(text: str, summaries: Sequence[Mapping[str, Any]]) -> str:
    """A text with its block of claims written anew."""
    if not BLOCK.search(text):
        raise ValueError("the text has no <!-- claims --> and <!-- /claims --> on lines of their own")
    return BLOCK.sub(lambda _: claims(summaries), text)


def quoted(summaries: Sequence[Mapping[str, Any]]) -> str:
    """The parts of a summary that a text quotes, as JSON with one line a study."""
    lines = (json.dumps({name: summary[name] for name in QUOTED}) for summary in summaries)
    return "[\n" + ",\n".join(lines) + "\n]\n"


def _study(summary: Mapping[str, Any]) -> str:
    failed = f", {summary['failed']} failed" if summary["failed"] else ""
    size = f"{summary['runs']} runs{failed}, {_minutes(summary['seconds'])}"
    head = f"### {summary['title']}\n\n`{summary['study']}`: {size}."
    if not summary["notes"]:
        return f"{head}\n"
    theirs = any(note.get("paper") for note in summary["notes"])  # their differences, in points
    columns = ["claim", *["the paper"] * theirs, "", "what was measured"]
    rows = [
        [note["claim"], *[note.get("paper", "")] * theirs, VERDICTS[note["verdict"]], note["evidence"]]
        for note in summary["notes"]
    ]
    lines = [f"| {' | '.join(cells)} |" for cells in (columns, *rows)]
    return "\n".join([head, "", lines[0], "|---" * len(columns) + "|", *lines[1:], ""])


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes of runs" if seconds >= 90 else f"{seconds:.0f} s of runs"


def main(argv: Sequence[str]) -> int:
    if len(argv) != 2:
        print("usage: python -m topk_studies.report.account SUMMARY.json TEXT.md", file=sys.stderr)
        return 2
    summary, path = map(Path, argv)
    summaries = json.loads(summary.read_text(encoding="utf-8"))
    path.write_text(update(path.read_text(encoding="utf-8"), summaries), "utf-8")
    path.with_suffix(".json").write_text(quoted(summaries), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
