"""One self-contained HTML page of all studies in a folder: it needs no network, no script and no other file."""

import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from topk_studies.engine.store import write_file
from topk_studies.engine.study import Section
from topk_studies.report import parts
from topk_studies.report.parts import each

TITLE = "Studies of top-k losses"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
COUNTED = {
    "agrees": ("agrees", "agree"),
    "differs": ("differs", "differ"),
    "same": ("shows no difference", "show no difference"),
    "open": ("stays open", "stay open"),
    "none": ("has no verdict", "have no verdict"),
}


def write_html(sections: Sequence[Section], path: Path) -> None:
    """The report as a single file."""
    write_file(path, page(sections))


def page(sections: Sequence[Section]) -> str:
    """The text of the page."""
    style = files("topk_studies.report").joinpath("page.css").read_text(encoding="utf-8")
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
<nav aria-label="Contents"><ol>{each(map(_entry, sections))}</ol></nav>
</header>
<main id="studies">
{each(map(_section, sections))}</main>
<footer><p class="quiet">{escape(_made_by(sections))}</p></footer>
</body>
</html>
"""


def _summary(sections: Sequence[Section]) -> str:
    runs = sum(len(section.records) for section in sections)
    broken = sum(len(section.failed) for section in sections)
    words = f"{_count(len(sections), 'study', 'studies')}, {_count(runs, 'run', 'runs')}."
    if broken:
        words += f" {_count(broken, 'run', 'runs')} failed; the reasons stand below."
    verdicts = [note.verdict for section in sections for note in section.findings.notes if not note.beyond]
    if verdicts:
        counts = ", ".join(_count(verdicts.count(v), *forms) for v, forms in COUNTED.items() if v in verdicts)
        words += f" Of {_count(len(verdicts), 'claim', 'claims')} of the papers, {counts}."
    return f"<p>{words}</p>"


def _entry(section: Section) -> str:
    return f'<li><a href="#{slug(section.name)}">{escape(section.title)}</a></li>\n'


def _section(section: Section) -> str:
    name, findings = slug(section.name), section.findings
    commands = ((("This study:", section.command),) if section.command else ()) + findings.commands
    return f"""<section class="study" id="{name}" aria-labelledby="{name}-title">
<h2 id="{name}-title">{escape(section.title)}</h2>
<p class="question">{escape(section.question)}</p>
<p class="quiet">{escape(section.reference)}</p>
{_titled("How", parts.paragraphs(findings.protocol))}
{_titled("What came out", parts.notes(findings.notes))}
{_titled("Tables", each(parts.table(table, f"{name}-table-{i}") for i, table in enumerate(findings.tables, 1)))}
{_titled("Figures", each(parts.figure(one, f"{name}-figure-{i}") for i, one in enumerate(findings.figures, 1)))}
{_titled("Failed runs", parts.failed(section.failed))}
{_titled("Repeat it", parts.commands(commands))}
{_titled("Runs", parts.facts(section.records))}
</section>
"""


def _titled(title: str, body: str) -> str:
    return f"<h3>{title}</h3>\n{body}" if body else ""


def _made_by(sections: Sequence[Section]) -> str:
    versions = {r.versions.get("topk-registry", "") for section in sections for r in section.records} - {""}
    return f"Made by topk-registry {', '.join(sorted(versions))}".strip() + "."


def slug(name: str) -> str:
    """A name as an id within the page."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
