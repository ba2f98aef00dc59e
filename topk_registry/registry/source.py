"""Read the summary of a plug-in from its source file, without an import, and suggest a name for a misspelled name."""

import ast
from collections.abc import Iterable
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path


def summary(module: str, name: str) -> str:
    """Return the first line of the docstring of the class or function ``module.name``, without importing the module.

    If there is no docstring, or if the source cannot be read, return an empty string.
    """
    top, *rest = module.split(".")
    try:
        spec = find_spec(top)  # find_spec of a dotted name would import the parent packages
        folders = (spec and spec.submodule_search_locations) or ()
        stems = [Path(folder, *rest) for folder in folders]
        files = [file for stem in stems for file in (stem.with_suffix(".py"), stem / "__init__.py") if file.is_file()]
        source = files[0] if files else Path(spec.origin if spec and spec.origin and not rest else "")
        nodes = ast.parse(source.read_bytes()).body
        named = [n for n in nodes if isinstance(n, (ast.ClassDef, ast.FunctionDef)) and n.name == name]
        return first_line(ast.get_docstring(named[-1]))
    except Exception:
        return ""


def closest(name: str, names: Iterable[str]) -> str:
    """Return ``; did you mean 'X'?`` with the most similar X of ``names``, or an empty string if none is similar."""
    close = get_close_matches(name, names, n=1, cutoff=0.65)  # 2/3: two letters of three are right, as in tua for tau
    return f"; did you mean {close[0]!r}?" if close else ""


def first_line(docstring: str | None) -> str:
    return (docstring or "").strip().partition("\n")[0].strip()
