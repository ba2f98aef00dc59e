"""One self-contained HTML page: headings, tables, plots, nothing fetched from anywhere."""

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

STYLE = """
:root { color-scheme: light dark; --line: light-dark(#dcdad3, #363a42); --quiet: light-dark(#5d6068, #a3a7b0); }
body { margin: 0 auto; max-width: 46rem; padding: 2rem 1.25rem 4rem; font: 16px/1.5 system-ui, sans-serif;
  background: light-dark(#fff, #16171a); color: light-dark(#1c1d20, #ececea); }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .4rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; }
p { margin: .4rem 0; } .quiet { color: var(--quiet); }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .35rem .75rem .35rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td { font-variant-numeric: tabular-nums; overflow-wrap: break-word; } svg { width: 100%; height: auto; }
h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
.gallery { display: grid; grid-template-columns: repeat(auto-fill, minmax(6.5rem, 1fr)); gap: .75rem; }
.gallery figure { margin: 0; } .gallery img { display: block; max-width: 100%; border-radius: 4px; }
figcaption { font-size: .75rem; line-height: 1.3; color: var(--quiet); overflow-wrap: anywhere; }
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(title: str, lead: str, sections: Sequence[tuple[str, str]]) -> str:
    """The text of a page; sections are headings and HTML."""
    body = "\n".join(f"<section><h2>{escape(name)}</h2>\n{content}</section>" for name, content in sections)
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><main><h1>{escape(title)}</h1><p>{escape(lead)}</p>\n{body}\n</main></body>\n</html>\n"
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table of cells as text; floats have four digits."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell(value))}</td>" for value in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>\n'


def cell(value: Any) -> str:
    """A value as a table shows it."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, tuple):
        return " to ".join(map(cell, value))
    return str(value)


def paragraph(text: str) -> str:
    """A paragraph of explanation, quieter than the findings."""
    return f'<p class="quiet">{escape(text)}</p>\n'


def heading(text: str) -> str:
    """A heading within a section."""
    return f"<h3>{escape(text)}</h3>\n"


def listing(items: Sequence[str]) -> str:
    """A list of sentences."""
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>\n"


def write_page(path: Path, text: str) -> None:
    """Write the page whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f".{path.name}.tmp")
    try:
        half.write_text(text, encoding="utf-8")
        os.replace(half, path)
    finally:
        half.unlink(missing_ok=True)
