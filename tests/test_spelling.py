"""Sentences are spelled as a dictionary of common mistakes has it; words of the glossary are right."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLACES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "topk_registry", "plugins", "export"]
BUILT = "*/_build/*,*/generated/*,*/.jupyter_cache/*,*/jupyter_execute/*,*.svg,*.json"
RIGHT = {"te"}  # a test split's name in a list of synonyms


def words_of_the_glossary() -> set[str]:
    """Words and symbols of the glossary's rows."""
    rows = re.findall(r"^\| ([^|]+) \| ([^|]*) \|", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    return {word.lower() for row in rows[2:] for word in re.findall(r"[A-Za-z]+", " ".join(row))}


def check(*places: str) -> subprocess.CompletedProcess[str]:
    words = ",".join(sorted(words_of_the_glossary() | RIGHT))
    command = [sys.executable, "-m", "codespell_lib", "--skip", BUILT, "--ignore-words-list", words, *places]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("codespell_lib") is None, reason="codespell is not installed"),
]


def test_nothing_is_misspelled():
    found = check(*PLACES)
    assert found.returncode == 0, found.stdout + found.stderr


def test_a_mistake_is_found(tmp_path):
    (tmp_path / "page.md").write_text("The margn is seperate.\n")
    assert "seperate ==> separate" in check(str(tmp_path)).stdout


def test_the_glossary_has_words():
    assert {"margin", "tilt", "cotangent", "marginal"} <= words_of_the_glossary()
