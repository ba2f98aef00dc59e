"""The documentation: ``sphinx-build -W docs docs/_build``. It needs no network, to be built or to be read."""

import sys
from importlib import metadata
from pathlib import Path

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "topk_registry"
author = "the topk_registry maintainers"
copyright = author
release = metadata.version("topk-registry")
extensions = [
    "myst_nb",  # MyST, and notebooks as text: reviewed line by line, run when the site is built
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx-mathjax-offline",
    "generated_pages",
]
exclude_patterns = ["_build", "_ext", "results/studies", ".jupyter_cache", "jupyter_execute"]
html_theme = "furo"
html_title = f"topk_registry {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
autodoc_typehints = "description"
autodoc_inherit_docstrings = False  # torch documents its own
autodoc_member_order = "bysource"
nb_execution_mode = "cache"  # a notebook runs again when its code changed; remove docs/.jupyter_cache to run all
nb_execution_cache_path = str(Path(__file__).parent / ".jupyter_cache")
nb_execution_timeout = 600  # a cell takes seconds, on a busy machine a minute
nb_execution_raise_on_error = True
nb_merge_streams = True
nb_output_stderr = "remove"  # progress, and paths of the machine that built the site
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
linkcheck_timeout = 20


def setup(app: Sphinx) -> None:
    # pictures drawn by GitHub; here their source is shown
    app.add_lexer("mermaid", TextLexer)
