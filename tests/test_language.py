"""Standard engineering English: the most frequent lapses in pages, docstrings and messages, by regular expressions."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ["topk_registry", "plugins", "export", "benchmarks", "docs"]
UNIT = "class|row|line|image|request|sample|loss|label|file|process|rank|second|step|epoch|chunk|batch|run|score|call"
UNIT += "|draw"
COUNTED = "one|lines?|rows?|images?|classes|numbers?|files?|entry|entries|thresholds?|labels?|programs?|tests?|jobs?"
COUNTED += "|index|bytes?|factors?|losses"
DIALECT = "pulls? (at|up) (a|the) label|chance of being|goes on training|chances|doors?|rooms|trips?|spoilt|untold"
LAPSES = {
    "say 'per': one line per request": rf"\b({COUNTED}) an? ({UNIT})\b",
    "say 'A - B' or 'A improves on B by x'": r"\bless (that|those) of\b|\bless (cross-entropy|its|their own)\b",
    "name the actor: 'the command exits with an error'": r"\b(is|are|was|were) (told|said|spelt)\b",
    "use the field's term": rf"\b({DIALECT})\b",
    "a reference page describes the present": r"\b(no longer|used to be|(until|since|as of) 20\d\d)\b",
}
DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b")


@cache
def prose() -> list[tuple[str, str]]:
    """Return (place, text) of every page and docstring."""
    pages = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "CHANGELOG.md",
        ROOT / "SECURITY.md",
        *(ROOT / "docs").rglob("*.md"),
        *(page for folder in ("topk_registry", "plugins", "export") for page in ROOT.glob(f"{folder}/**/*.md")),
    ]
    found = [
        (str(page.relative_to(ROOT)), re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S))
        for page in pages
        if not {"generated", "_build", "jupyter_execute"} & set(page.parts)
    ]
    for folder in SOURCES:
        for path in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for node in ast.walk(tree):
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                    text = ast.get_docstring(node)
                    if text:
                        name = getattr(node, "name", "module")
                        found.append((f"{path.relative_to(ROOT)}: {name}", text))
    return found


@pytest.mark.parametrize("rule", LAPSES)
def test_lapses(rule):
    pattern = re.compile(LAPSES[rule], re.I)
    found = [f"{place}: {match[0]!r}" for place, text in prose() for match in pattern.finditer(text)]
    assert not found, f"{rule}:\n" + "\n".join(found[:40])


def test_pages_have_no_dates():
    found = [
        f"{place}: {match[0]}" for place, text in prose() if place.endswith(".md") for match in DATE.finditer(text)
    ]
    assert not found, found
