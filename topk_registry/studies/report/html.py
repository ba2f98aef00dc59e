"""One self-contained HTML page of all studies in a folder: it needs no network, no script and no other file."""

import base64
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from topk_registry.studies.report import plots
from topk_registry.studies.report.cells import best_cells, is_number, text
from topk_registry.studies.study import Figure, Findings, Note, Record, Section, Table

LARGEST_SVG = 700_000  # characters; what is more intricate becomes a PNG
TITLE = "Studies of top-k losses"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
VERDICTS = {"agrees": "Agrees", "differs": "Differs", "open": "Open"}
MARK = "★ is better than all it competes with, the intervals apart."
NO_MARK = "No cell is marked as best: the intervals overlap, or a single run has none."


def write_html(sections: Sequence[Section], path: Path) -> None:
    """The report as a single file."""
    path.write_text(page(sections), encoding="utf-8")


def page(sections: Sequence[Section]) -> str:
    """The text of the page."""
    style = files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{TITLE}</title>
<link rel="icon" href="data:,">
<style>
{style}</style>
</head>
<body>
<a class="skip" href="#studies">Skip to the studies</a>
<header>
<h1>{TITLE}</h1>
{_summary(sections)}
<nav aria-label="Contents"><ol>{_each(_entry(section) for section in sections)}</ol></nav>
</header>
<main id="studies">
{_each(map(_section, sections))}
</main>
<footer><p class="quiet">{_made_by(sections)}</p></footer>
</body>
</html>
"""


def _summary(sections: Sequence[Section]) -> str:
    runs = sum(len(section.records) for section in sections)
    failed = sum(len(section.failed) for section in sections)
    verdicts = [note.verdict for section in sections for note in section.findings.notes]
    counts = ", ".join(
        f"{verdicts.count(key)} {_plural(verdicts.count(key), words)}"
        for key, words in (
            ("agrees", ("agrees", "agree")),
            ("differs", ("differs", "differ")),
            ("open", ("stays open", "stay open")),
        )
    )
    problems = f" {failed} {_plural(failed, ('run', 'runs'))} failed." if failed else ""
    claims = f" Of {len(verdicts)} claims of the papers, {counts}." if verdicts else ""
    return f"<p>{_count(len(sections), 'study', 'studies')}, {_count(runs, 'run', 'runs')}.{problems}{claims}</p>"


def _entry(section: Section) -> str:
    return f'<li><a href="#{_slug(section.name)}">{escape(section.title)}</a></li>\n'


def _section(section: Section) -> str:
    name, found = _slug(section.name), section.findings
    return f"""<section class="study" id="{name}" aria-labelledby="{name}-title">
<h2 id="{name}-title">{escape(section.title)}</h2>
<p class="question">{escape(section.question)}</p>
<p class="quiet">{escape(section.reference)}</p>
{_titled("How", _paragraphs(found.protocol))}
{_titled("What came out", _notes(found.notes))}
{_titled("Tables", _each(_table(table, f"{name}-table-{i}") for i, table in enumerate(found.tables, 1)))}
{_titled("Figures", _each(_figure(figure, f"{name}-figure-{i}") for i, figure in enumerate(found.figures, 1)))}
{_titled("Failed runs", _failed(section.failed))}
{_titled("Repeat it", _commands(section.command, found))}
{_titled("Runs", _runs(section.records))}
</section>
"""


def _titled(title: str, body: str) -> str:
    return f"<h3>{title}</h3>\n{body}" if body else ""


def _paragraphs(words: str) -> str:
    return _each(f"<p>{escape(block)}</p>" for block in re.split(r"\n\s*\n", words.strip()) if block)


def _notes(notes: Sequence[Note]) -> str:
    items = (
        f'<li class="{note.verdict}"><span class="verdict">{VERDICTS[note.verdict]}.</span> {escape(note.claim)} '
        f'<span class="evidence">{escape(note.evidence)}</span></li>'
        for note in notes
    )
    return f'<ul class="findings">{_each(items)}</ul>' if notes else ""


def _table(table: Table, name: str) -> str:
    best = best_cells(table)
    numeric = {c for c in range(1, len(table.columns)) if any(is_number(row[c]) for row in table.rows)}
    head = _each(
        f'<th scope="col"{_class(number=c in numeric, paper=column in table.paper)}>{escape(column)}</th>'
        for c, column in enumerate(table.columns)
    )
    body = _each(_row(table, r, numeric, best) for r in range(len(table.rows)))
    marks = (MARK if best else NO_MARK) if table.compared else ""
    note = " ".join(filter(None, (table.note, marks)))
    return (
        f'<figure id="{name}"><div class="scroll" tabindex="0" role="region" aria-label="{escape(table.title)}">\n'
        f"<table><caption>{escape(table.title)}</caption>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table>"
        f"</div>\n{f'<figcaption>{escape(note)}</figcaption>' if note else ''}</figure>\n"
    )


def _row(table: Table, r: int, numeric: set[int], best: set[tuple[int, int]]) -> str:
    first, *others = table.rows[r]
    cells = (
        f"<td{_class(number=c in numeric, paper=table.columns[c] in table.paper, best=(r, c) in best)}>"
        f"{escape(text(value))}</td>"
        for c, value in enumerate(others, 1)
    )
    return f'<tr><th scope="row">{escape(text(first))}</th>{_each(cells)}</tr>\n'


def _figure(figure: Figure, name: str) -> str:
    words = escape(figure.alt or f"{figure.title}. {figure.caption}")
    drawn = plots.svg(figure, name=name)
    if len(drawn) <= LARGEST_SVG:
        picture = drawn.replace("<svg ", f'<svg role="img" aria-label="{words}" ', 1)
    else:
        picture = f'<img alt="{words}" src="data:image/png;base64,{base64.b64encode(plots.png(figure)).decode()}">'
    return (
        f'<figure id="{name}"><div class="scroll" tabindex="0" role="region" aria-label="{escape(figure.title)}">\n'
        f"{picture}</div>\n<figcaption><b>{escape(figure.title)}.</b> {escape(figure.caption)}</figcaption></figure>\n"
    )


def _failed(records: Sequence[Record]) -> str:
    items = _each(f"<dt>{escape(_spelt(r.configuration))}</dt><dd>{escape(r.error)}</dd>\n" for r in records)
    return f'<dl class="failed">{items}</dl>' if records else ""


def _commands(command: str, found: Findings) -> str:
    every = ((("This report", command),) if command else ()) + found.commands
    return _each(f'<p>{escape(what)}</p><pre tabindex="0"><code>{escape(line)}</code></pre>' for what, line in every)


def _runs(records: Sequence[Record]) -> str:
    if not records:
        return ""
    days = sorted({record.when[:10] for record in records})
    facts = {
        "Number": str(len(records)),
        "Time": _duration(sum(record.seconds for record in records)),
        "Made": days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}",
    }
    names = sorted({name for record in records for name in record.versions}, key=str.lower)
    for name in names:
        facts[name] = ", ".join(sorted({r.versions[name] for r in records if r.versions.get(name)}))
    return f"<dl>{_each(f'<dt>{escape(k)}</dt><dd>{escape(v)}</dd>' for k, v in facts.items() if v)}</dl>"


def _made_by(sections: Sequence[Section]) -> str:
    versions = {r.versions.get("topk-registry") for section in sections for r in section.records} - {None}
    return escape(f"Made by topk-registry {', '.join(sorted(map(str, versions)))}".strip() + ".")


def _spelt(configuration: dict[str, object]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in configuration.items())


def _class(**classes: bool) -> str:
    chosen = " ".join(name for name, wanted in classes.items() if wanted)
    return f' class="{chosen}"' if chosen else ""


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _plural(number: int, words: tuple[str, str]) -> str:
    return words[number != 1]


def _each(parts: Iterable[str]) -> str:
    return "".join(parts)
