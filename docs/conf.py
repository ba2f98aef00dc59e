"""Sphinx configuration. ``sphinx-build -W docs docs/_build`` builds the documentation, and needs no network."""

import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "topk_registry"
author = "the topk_registry maintainers"
copyright = author
release = metadata.version("topk-registry")
extensions = [
    "myst_nb",  # reads Markdown pages, and runs the code of the tutorials when the site is built
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx-mathjax-offline",
    "generated_pages",
]
exclude_patterns = ["_build", "_ext", "architecture.md", ".jupyter_cache", "jupyter_execute"]
html_theme = "furo"
html_title = f"topk_registry {release}"
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
autodoc_typehints = "description"
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
nb_execution_mode = "cache"  # a tutorial runs again only if its code has changed
nb_execution_cache_path = str(Path(__file__).parent / ".jupyter_cache")
nb_execution_timeout = 600
nb_execution_raise_on_error = True
nb_merge_streams = True
nb_output_stderr = "remove"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
