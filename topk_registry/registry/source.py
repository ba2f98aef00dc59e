"""Read a plug-in's source without running it: the summary of a loss, its attributes, and what is wrong with it.

``importlib.util.find_spec("a.b")`` imports ``a``. Here each level is looked up by the import system's finders with the
search path of the level above, so that no package's code runs.
"""

import ast
import re
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from functools import lru_cache
from importlib.machinery import ModuleSpec
from pkgutil import get_importer, iter_modules

_MAX_HOPS = 4  # re-exports that are followed
_DYNAMIC = {"__getattr__", "globals", "setattr", "exec", "import *"}  # a module with one of these may define any name


def find_spec(module: str) -> ModuleSpec | None:
    """Return the spec of a dotted module, or None if no finder knows it."""
    spec, path, name = None, None, ""
    for part in module.split("."):
        name = f"{name}.{part}".lstrip(".")
        spec = getattr(sys.modules.get(name), "__spec__", None) or _ask_finders(name, path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or [])
    return spec


def _ask_finders(name: str, path: list[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, path) if hasattr(finder, "find_spec") else None
        except KeyError:  # a namespace package asks sys.modules for its parent, which was not imported
            spec = _ask_folders(name, path or [])
        if spec is not None:
            return spec
    return None


def _ask_folders(name: str, path: list[str]) -> ModuleSpec | None:
    namespace = ModuleSpec(name, None)
    namespace.submodule_search_locations = portions = []
    for folder in path:
        importer = get_importer(folder)
        spec = importer.find_spec(name) if importer else None
        if spec is not None and spec.loader:
            return spec
        portions += (spec.submodule_search_locations or []) if spec else []
    return namespace if portions else None


def read(module: str) -> str | None:
    """Return the module's source, or None if its loader has none."""
    spec = find_spec(module)
    get_source = getattr(spec.loader, "get_source", None) if spec else None
    return get_source(module) if get_source else None


def summary(module: str, attr: str) -> str:
    """Return the first line of the docstring of ``module:attr``, else of its module, else nothing. Never raises."""
    try:
        tree, node = _definition(module, attr)
        own = ast.get_docstring(node) if isinstance(node, (ast.ClassDef, ast.FunctionDef)) else None
        return first_line(own or ast.get_docstring(tree))
    except Exception:
        return ""


def declares(module: str, attr: str, name: str) -> bool:
    """Return whether the source sets the attribute ``name`` of ``module:attr`` to True. Never raises."""
    try:
        tree, node = _definition(module, attr)
        inside = node.body if isinstance(node, ast.ClassDef) else []
        below = any(_sets_true(each, f"{node.name}.{name}") for each in tree.body)  # pyright: ignore
        return below or any(_sets_true(each, name) for each in inside)
    except Exception:
        return False


def problem(module: str, attr: str) -> str:
    """Return what is certainly wrong with ``module:attr``: no such module, bad syntax, no such name; else nothing."""
    if find_spec(module) is None:
        parent, _, leaf = module.rpartition(".")
        spec = find_spec(parent) if parent else None
        names = [info.name for info in iter_modules(spec.submodule_search_locations if spec else None)]
        return f"module {module!r} is not installed{closest(leaf, names)}"
    text = read(module)
    if text is None:
        return ""
    try:
        _tree(text)
    except SyntaxError as error:
        return f"SyntaxError: {error.msg} ({module}, line {error.lineno})"
    first, words = attr.partition(".")[0], set(re.findall(r"import \*|\w+", text))
    if first in words or words & _DYNAMIC or find_spec(f"{module}.{first}"):
        return ""
    return f"module {module!r} has no attribute {first!r}{closest(first, words)}"


def closest(name: str, names: Iterable[str]) -> str:
    """Return ``; did you mean 'X'?`` with the closest name, or nothing."""
    close = get_close_matches(name, names, n=1, cutoff=0.7)
    return f"; did you mean {close[0]!r}?" if close else ""


def first_line(docstring: str | None) -> str:
    return (docstring or "").strip().partition("\n")[0].strip()


@lru_cache(maxsize=64)
def _tree(text: str) -> ast.Module:
    return ast.parse(text)


def _definition(module: str, attr: str, hops: int = _MAX_HOPS) -> tuple[ast.Module, ast.AST]:
    """Return the module's tree and the node that defines a dotted attribute, in the module that defines it."""
    tree = _tree(read(module) or "")
    node: ast.AST = tree
    for part in attr.split("."):
        node = next((each for each in getattr(node, "body", ()) if part in _names_of(each)), ast.Pass())
    if isinstance(node, ast.ImportFrom) and hops:
        names = {alias.asname or alias.name: alias.name for alias in node.names}
        return _definition(_absolute(module, node), names[attr], hops - 1)
    return tree, node


def _names_of(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    return [node.name] if isinstance(node, (ast.ClassDef, ast.FunctionDef)) else []


def _sets_true(node: ast.AST, name: str) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    value = getattr(node, "value", None)
    return isinstance(value, ast.Constant) and value.value is True and any(ast.unparse(t) == name for t in targets)


def _absolute(module: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    spec = find_spec(module)
    is_package = spec is not None and spec.submodule_search_locations is not None
    parts = module.split(".")
    return ".".join([*parts[: len(parts) - node.level + is_package], *([node.module] if node.module else [])])
