"""The pieces of the page: tables, figures, claims, failed runs, commands. All that comes from elsewhere is escaped."""

import base64
import re
from collections.abc import Iterable, Sequence
from html import escape

from topk_studies.engine.study import Figure, Note, Record, Table
from topk_studies.report import plots
from topk_studies.report.cells import Cell, best_cells, duration, is_number, text

LARGEST_SVG = 700_000  # characters; what is more intricate becomes a PNG
VERDICTS = {"agrees": "Agrees", "differs": "Differs", "same": "No difference", "open": "Open", "none": "No verdict"}
BEYOND = {**VERDICTS, "agrees": "Holds", "differs": "Fails"}  # of a claim that is not the paper's
MARK = "★ is better than all it competes with, the intervals apart."
NO_MARK = "None is marked as best: the intervals overlap, or a single run has none."


def notes(claims: Sequence[Note]) -> str:
    return f'<ul class="findings">{each(map(_note, claims))}</ul>' if claims else ""


def _note(note: Note) -> str:
    verdict = (BEYOND if note.beyond else VERDICTS)[note.verdict]
    return (
        f'<li class="{note.verdict}"><span class="verdict">{verdict}.</span> '
        f"{'Beyond the paper: ' if note.beyond else ''}{escape(note.claim)} "
        f'<span class="evidence">{escape(note.told)}</span></li>\n'
    )


def table(table: Table, name: str) -> str:
    best = best_cells(table)
    numeric = {c for c in range(1, len(table.columns)) if any(is_number(row[c]) for row in table.rows)}
    head = each(
        f'<th scope="col"{_class(number=c in numeric, paper=column in table.paper)}>{escape(column)}</th>'
        for c, column in enumerate(table.columns)
    )
    body = each(_row(table, r, numeric, best) for r in range(len(table.rows)))
    marks = (MARK if best else NO_MARK) if table.compared else ""
    grid = f'<table aria-labelledby="{name}-title">\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table>'
    return _framed(table.title, name, grid, " ".join(filter(None, (table.note, marks))))


def _row(table: Table, r: int, numeric: set[int], best: set[Cell]) -> str:
    first, *others = table.rows[r]
    cells = (
        f"<td{_class(number=c in numeric, paper=table.columns[c] in table.paper, best=(r, c) in best)}>"
        f"{escape(text(value))}</td>"
        for c, value in enumerate(others, 1)
    )
    return f'<tr><th scope="row">{escape(text(first))}</th>{each(cells)}</tr>\n'


def figure(figure: Figure, name: str) -> str:
    words = escape(figure.alt or f"{figure.title}. {figure.caption}")
    drawn = plots.svg(figure, name=name)
    width = f"--wide: {4 * figure.size[0]:.0f}rem"
    if len(drawn) <= LARGEST_SVG:
        picture = drawn.replace("<svg ", f'<svg role="img" aria-label="{words}" style="{width}" ', 1)
    else:
        encoded = base64.b64encode(plots.png(figure)).decode()
        picture = f'<img alt="{words}" style="{width}" src="data:image/png;base64,{encoded}">'
    return _framed(figure.title, name, picture, figure.caption)


def _framed(title: str, name: str, content: str, note: str) -> str:
    """A heading, what may be wider than the window and scrolls by itself, and a note."""
    return (
        f'<figure id="{name}"><h4 id="{name}-title">{escape(title)}</h4>\n'
        f'<div class="scroll" tabindex="0" role="region" aria-labelledby="{name}-title">\n{content}</div>\n'
        f"{f'<figcaption>{escape(note)}</figcaption>' if note else ''}</figure>\n"
    )


def failed(records: Sequence[Record]) -> str:
    items = (
        f"<li>{escape(_spelt(record.configuration))}: <b>{escape(_last_line(record.error))}</b>\n"
        f'<details><summary>All of it</summary><pre tabindex="0">{escape(record.error)}</pre></details></li>\n'
        for record in records
    )
    return f'<ul class="failed">{each(items)}</ul>' if records else ""


def commands(every: Sequence[tuple[str, str]]) -> str:
    return each(f'<p>{escape(what)}</p><pre tabindex="0"><code>{escape(line)}</code></pre>\n' for what, line in every)


def facts(records: Sequence[Record]) -> str:
    """Line of facts: number of runs, their time, dates, machine and versions."""
    if not records:
        return ""
    days = sorted({record.when[:10] for record in records})
    entries = {
        "runs": str(len(records)),
        "time": duration(sum(record.seconds for record in records)),
        "made": days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}",
    }
    for name in sorted({name for record in records for name in record.versions}, key=str.lower):
        entries[name] = ", ".join(sorted({r.versions[name] for r in records if r.versions.get(name)}))
    return f"<dl>{each(f'<dt>{escape(k)}</dt><dd>{escape(v)}</dd>' for k, v in entries.items() if v)}</dl>"


def paragraphs(words: str) -> str:
    return each(f"<p>{escape(block)}</p>\n" for block in re.split(r"\n\s*\n", words.strip()) if block)


def each(parts: Iterable[str]) -> str:
    return "".join(parts)


def _last_line(error: str) -> str:
    return (error.strip().splitlines() or [""])[-1]


def _spelt(configuration: dict[str, object]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in configuration.items())


def _class(**classes: bool) -> str:
    chosen = " ".join(name for name, wanted in classes.items() if wanted)
    return f' class="{chosen}"' if chosen else ""
