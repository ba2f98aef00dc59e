"""Read the source of a plug-in without running it."""

import ast
from collections.abc import Iterable
from difflib import get_close_matches
from importlib.machinery import all_suffixes
from importlib.util import find_spec
from pathlib import Path
from typing import Any

DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.Module)


def file_of(module: str) -> Path | None:
    """Return the file of a dotted module, or None, without importing its parents, unlike ``find_spec``."""
    top, *rest = module.split(".")
    spec = find_spec(top)
    if spec is None or not rest:
        return Path(spec.origin) if spec and spec.origin else None
    places = [Path(folder, *rest) for folder in spec.submodule_search_locations or ()]
    stems = [stem for place in places for stem in (place, place / "__init__")]
    files = [stem.with_name(stem.name + suffix) for stem in stems for suffix in all_suffixes()]
    return next((file for file in files if file.is_file()), None)


def summary(module: str, attr: str) -> str:
    """Return the first line of the docstring of ``module:attr``, else of its module, else an empty string."""
    try:
        file = file_of(module)
        node: Any = ast.parse(file.read_bytes() if file else b"")
        nodes = [node]
        for part in attr.split("."):
            node = next((each for each in getattr(node, "body", ()) if getattr(each, "name", "") == part), ast.Pass())
            nodes.insert(0, node)
        texts = [ast.get_docstring(each) for each in (nodes[0], nodes[-1]) if isinstance(each, DEFINITIONS)]
        return first_line(next(filter(None, texts), ""))
    except Exception:
        return ""


def closest(name: str, names: Iterable[str]) -> str:
    """Return ``; did you mean 'X'?`` with the closest name, or an empty string."""
    close = get_close_matches(name, names, n=1, cutoff=0.7)
    return f"; did you mean {close[0]!r}?" if close else ""


def first_line(docstring: str | None) -> str:
    return (docstring or "").strip().partition("\n")[0].strip()
