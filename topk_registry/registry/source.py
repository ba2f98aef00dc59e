"""Reading a plug-in's source without running it.

``importlib.util.find_spec("a.b")`` imports ``a``. Here each level is asked of the import system's finders with the
search path that the level above declares, so no package's code runs, and the one-line summary of a loss comes from its
parsed source.
"""

import ast
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pkgutil import get_importer


def find_spec(module: str) -> ModuleSpec | None:
    """Return the spec of a dotted module, or None where no finder knows it."""
    spec, path = None, None
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        spec = getattr(sys.modules.get(name), "__spec__", None) or _ask_finders(name, path)
        if spec is None or depth == len(parts):
            return spec
        path = list(spec.submodule_search_locations or [])
    return spec


def summary(module: str, attr: str) -> str:
    """Return the first line of the docstring of ``module:attr``, else of its module, else nothing. Never raises."""
    try:
        return _summary(module, attr, hops=4)
    except Exception:
        return ""


def first_line(docstring: str | None) -> str:
    return (docstring or "").strip().partition("\n")[0].strip()


def read(module: str) -> str | None:
    """Return the module's source, or None where its loader has none."""
    spec = find_spec(module)
    get_source = getattr(spec.loader, "get_source", None) if spec else None
    return get_source(module) if get_source else None


def _ask_finders(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        if not hasattr(finder, "find_spec"):
            continue
        try:
            spec = finder.find_spec(name, path)
        except KeyError:  # a namespace package asks sys.modules for its parent, which was not imported
            spec = _ask_folders(name, path or ())
        if spec is not None:
            return spec
    return None


def _ask_folders(name: str, path: Sequence[str]) -> ModuleSpec | None:
    portions: list[str] = []
    for folder in path:
        importer = get_importer(folder)
        spec = importer.find_spec(name) if importer else None
        if spec is not None and spec.loader:
            return spec
        portions += (spec.submodule_search_locations or []) if spec else []
    namespace = ModuleSpec(name, None)
    namespace.submodule_search_locations = portions
    return namespace if portions else None


def _summary(module: str, attr: str, hops: int) -> str:
    source = read(module)
    if source is None:
        return ""
    tree = ast.parse(source)
    scope: ast.AST | None = tree
    for part in attr.split("."):
        scope = _definition(scope, part)
    if isinstance(scope, ast.ImportFrom) and hops:
        names = {alias.asname or alias.name: alias.name for alias in scope.names}
        return _summary(_absolute(module, scope), names[attr], hops - 1)
    own = ast.get_docstring(scope) if isinstance(scope, (ast.ClassDef, ast.FunctionDef)) else None
    return first_line(own or ast.get_docstring(tree))


def _definition(scope: ast.AST | None, name: str) -> ast.AST | None:
    for node in getattr(scope, "body", []):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and any(name == (alias.asname or alias.name) for alias in node.names):
            return node
    return None


def _absolute(module: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    spec = find_spec(module)
    is_package = spec is not None and spec.submodule_search_locations is not None
    parts = module.split(".")
    base = parts[: len(parts) - node.level + is_package]
    return ".".join([*base, *([node.module] if node.module else [])])
