"""Tutorials as notebooks: each page beside it as .ipynb, and a link that opens it in Colab.

Colab opens notebooks that lie in a repository at GitHub; the site's branch holds them. Its name is taken from
``GITHUB_REPOSITORY``, which GitHub's workflows set; elsewhere pages have no link.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import nbformat
from myst_nb.core.read import read_myst_markdown_notebook
from nbformat.v4 import new_code_cell
from sphinx.application import Sphinx

FOLDER = "tutorials/"
BRANCH = "gh-pages"
INSTALL = '%pip install --quiet "topk-registry[fast,onnx,curves]"'
TITLE = re.compile(r"^# .+\n", re.MULTILINE)


def link(repository: str, version: str, page: str) -> str:
    """The line that opens a page of a version of the site."""
    place = f"https://colab.research.google.com/github/{repository}/blob/{BRANCH}/{version}/{page}.ipynb"
    return f"[Open in Colab]({place})"


def notebook(text: str) -> str:
    """A page as the text of a notebook, whose first cell installs the package."""
    made = read_myst_markdown_notebook(text)
    made.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    made.cells.insert(1, new_code_cell(INSTALL))
    for i, cell in enumerate(made.cells):
        cell["id"] = f"cell-{i}"  # the same whenever the site is built
    made.nbformat_minor = 5
    nbformat.validate(made)
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


def add_link(app: Sphinx, page: str, source: list[str]) -> None:
    """Put the link below the title of a tutorial."""
    repository = os.environ.get("GITHUB_REPOSITORY", "")
    if not page.startswith(FOLDER) or not repository:
        return
    tag = os.environ.get("GITHUB_REF_NAME", "") if os.environ.get("GITHUB_REF_TYPE") == "tag" else ""
    line = link(repository, tag or "latest", page)
    source[0] = TITLE.sub(lambda title: f"{title[0]}\n{line}\n", source[0], count=1)


def write_notebooks(app: Sphinx, error: Exception | None) -> None:
    """Write each tutorial as a notebook beside its page."""
    if error is not None or app.builder.format != "html":
        return
    for path in sorted((Path(app.srcdir) / FOLDER).glob("*.md")):
        target = Path(app.outdir) / FOLDER / f"{path.stem}.ipynb"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(notebook(path.read_text(encoding="utf-8")), encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", add_link)
    app.connect("build-finished", write_notebooks)
    return {"parallel_read_safe": True}
