"""The site builds without warnings: without notebooks in the gate, with them at night."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import topk_export
from tests import needs

ROOT = Path(__file__).parents[1]


def build(folder: Path, *options: str) -> None:
    needs.package("sphinx", extra="docs")
    docs = folder / "docs"
    ignored = shutil.ignore_patterns("_build", "generated", ".jupyter_cache", "jupyter_execute")
    shutil.copytree(ROOT / "docs", docs, ignore=ignored)
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    command = [sys.executable, "-m", "sphinx", "-q", "-W", *options, str(docs), str(folder / "site")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.slow
def test_the_site_builds_without_notebooks(tmp_path):
    build(tmp_path, "-D", "nb_execution_mode=off")
    page = (tmp_path / "site" / "generated" / "losses" / "smooth_topk_svm.html").read_text()
    assert "tau" in page
    assert "choose.html" in (tmp_path / "site" / "index.html").read_text()
    api = (tmp_path / "site" / "generated" / "api.html").read_text()
    assert all(f'id="topk_export.{name}"' in api for name in topk_export.__all__)


def test_all_names_of_topk_export_can_be_imported():
    names = {}
    exec("from topk_export import *", names)
    assert names.keys() - {"__builtins__"} == set(dir(topk_export)) == set(topk_export._MODULES)


@pytest.mark.nightly
def test_the_notebooks_run(tmp_path):
    build(tmp_path)
