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
    "colab",
]
exclude_patterns = ["_build", "_ext", "_templates", "results/studies", ".jupyter_cache", "jupyter_execute"]
html_theme = "furo"
html_title = f"topk_registry {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
# versions.js is written by docs/versions.py
html_js_files = [(name, {"defer": "defer"}) for name in ("versions.js", "switcher.js", "tables.js")]
templates_path = ["_templates"]
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/search.html",
        "sidebar/versions.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
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
# sphinx-build -b linkcheck docs docs/_build/links: asks every external link, so it is no part of CI
linkcheck_timeout = 20
linkcheck_retries = 2
linkcheck_workers = 4
linkcheck_ignore = [r"http://127\.0\.0\.1.*", r"https?://([\w-]+\.)*example\.com.*"]  # of a reader's own service
linkcheck_anchors_ignore_for_url = [r"https://github\.com/.*"]  # made by scripts
linkcheck_report_timeouts_as_broken = False


def setup(app: Sphinx) -> None:
    # pictures drawn by GitHub; here their source is shown
    app.add_lexer("mermaid", TextLexer)
