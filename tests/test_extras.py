"""Extras that messages, pages and other extras name are those of pyproject.toml, so that ``pip install`` finds them."""

import re
from importlib.metadata import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAMED = re.compile(r"(?:topk-registry|--editable \"?\.|-e \"?\.)\[([a-z,-]+)\]")


def test_every_extra_that_is_named_exists():
    known = set(metadata("topk-registry").get_all("Provides-Extra") or ())
    folders = ("topk_registry", "export", "plugins", "docs", "tests", ".github")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".md", ".yml"}]
    named = {
        (path.name, extra)
        for path in [*files, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "pyproject.toml"]
        for extras in NAMED.findall(path.read_text(encoding="utf-8"))
        for extra in extras.split(",")
    }
    assert ("README.md", "test") in named
    assert not {(file, extra) for file, extra in named if extra not in known}


def test_errors_name_an_installation_that_works_in_a_checkout():
    """No index has the package, so `pip install 'topk-registry[onnx]'` cannot work."""
    for folder in ("topk_registry", "export", "plugins"):
        for path in (ROOT / folder).rglob("*.py"):
            assert "install 'topk-registry[" not in path.read_text(encoding="utf-8"), path


def test_the_gate_types_the_pages_in_the_environment_of_the_set_up():
    gate = (ROOT / ".ci" / "run").read_text()
    assert '--editable ".[all]"' in (ROOT / "README.md").read_text().partition("<!-- ci: set-up -->")[2].split("```")[1]
    steps = ['bash -euc "$setup"', "type_blocks README.md", "type_blocks docs/quickstart.md", 'bash -euc "$tests"']
    places = [gate.index(step) for step in steps]
    assert places == sorted(places)
