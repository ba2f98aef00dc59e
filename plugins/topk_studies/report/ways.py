"""Write what a study that compares ways found into its page: a table of scores, and sentences on who is ahead.

``python -m topk_studies.report.ways docs/results/several_labels.md`` reads the JSON file beside the page. The page
holds the table between ``<!-- ways -->`` and ``<!-- /ways -->``, and the sentences between ``<!-- ahead -->`` and
``<!-- /ahead -->``.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TABLE = re.compile(r"(?<=<!-- ways -->\n).*?(?=<!-- /ways -->)", re.DOTALL)
SENTENCES = re.compile(r"(?<=<!-- ahead -->\n).*?(?=<!-- /ahead -->)", re.DOTALL)
COMPARED = re.compile(r"^(?P<metric>[\w -]+) of (?P<better>.+) less (?P<worse>.+): (?P<gap>[+-][\d.]+ ± [\d.]+) points")
TOLD = {"agrees": "ahead", "same": "no different by a point", "open": "open", "differs": "behind"}


def table(summary: Mapping[str, Any]) -> str:
    """The scores in Markdown, one row a way."""
    scores = summary["tables"][0]
    rows = [["way", *scores["columns"][1:]], ["---"] * len(scores["columns"])]
    rows += [[_cell(value) for value in row] for row in scores["rows"]]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def sentences(summary: Mapping[str, Any]) -> str:
    """For each metric and each way that others are compared with: who is ahead, level, open and behind."""
    lines: dict[tuple[str, str], dict[str, list[str]]] = {}
    for note in summary["notes"]:
        match = COMPARED.match(note["evidence"])
        if match is None:
            raise ValueError(f"expected a difference of two ways, got {note['evidence']!r}")
        groups = lines.setdefault((match["metric"], match["worse"]), {})
        groups.setdefault(TOLD[note["verdict"]], []).append(f"{match['better']} ({match['gap']})")
    return "".join(
        f"- In {metric}, against {worse}: "
        + "; ".join(f"{words}: {', '.join(groups[words])}" for words in TOLD.values() if words in groups)
        + ".\n"
        for (metric, worse), groups in lines.items()
    )


def update(text: str, summary: Mapping[str, Any]) -> str:
    """A page with its table and its sentences written anew."""
    text = TABLE.sub(lambda _: table(summary), text)
    return SENTENCES.sub(lambda _: sentences(summary), text)


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{value['mean']:.1f} ± {value['half_width']:.1f}"
    return "" if value is None else f"{value}"


def main(argv: Sequence[str]) -> int:
    if len(argv) != 1:
        print("usage: python -m topk_studies.report.ways PAGE.md", file=sys.stderr)
        return 2
    page = Path(argv[0])
    (summary,) = json.loads(page.with_suffix(".json").read_text(encoding="utf-8"))
    page.write_text(update(page.read_text(encoding="utf-8"), summary), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
