"""Reading a plug-in's source without running it.

``importlib.util.find_spec("a.b")`` imports ``a``. Here each level is asked of the import system's finders with the
search path that the level above declares, so no package's code runs, and the one-line summary of a loss comes from its
parsed source. What is wrong with a source can be told in the same way: bad syntax, or a name that it does not define.
"""

import ast
import sys
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from functools import lru_cache
from importlib.machinery import ModuleSpec
from pkgutil import get_importer, iter_modules

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_BINDS_UNSEEN = ("__getattr__", "globals", "setattr", "exec")  # a module with one of these may define anything


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


def declares(module: str, attr: str, name: str) -> bool:
    """Return whether the source of ``module:attr`` sets its attribute ``name`` to True. Never raises.

    It is set in the body of the class, or as ``attr.name = True`` below a function.
    """
    try:
        return _declares(module, attr, name, hops=4)
    except Exception:
        return False


def problem(module: str, attr: str) -> str:
    """Return what is certainly wrong with ``module:attr``, or nothing: no such module, bad syntax, or no such name."""
    if find_spec(module) is None:
        return f"module {module!r} is not installed{misspelt(module)}"
    text = read(module)
    if text is None:
        return ""
    try:
        bound = _bound(_tree(text))
    except SyntaxError as error:
        return f"SyntaxError: {error.msg} ({module}, line {error.lineno})"
    first = attr.partition(".")[0]
    if bound is None or first in bound or find_spec(f"{module}.{first}"):
        return ""
    return f"module {module!r} has no attribute {first!r}{closest(first, bound)}"


def misspelt(module: str, missing: str | None = None) -> str:
    """Return a suggestion for the first part of a dotted module that is not there, or nothing.

    Args:
        missing: the module that an import did not find; nothing is suggested where that is another one.
    """
    parts = module.split(".")
    known, path = "", None
    for part in parts:
        name = f"{known}.{part}".lstrip(".")
        spec = find_spec(name)
        if spec is None:
            if missing not in (None, name):
                return ""
            names = sorted({f"{known}.{info.name}".lstrip(".") for info in iter_modules(path)})
            return closest(name, names)
        known, path = name, list(spec.submodule_search_locations or [])
    return ""


def closest(name: str, names: Iterable[str]) -> str:
    """Return ``; did you mean 'X'?`` with the closest of names, or nothing."""
    close = get_close_matches(name, names, n=1, cutoff=0.7)
    return f"; did you mean {close[0]!r}?" if close else ""


def first_line(docstring: str | None) -> str:
    return (docstring or "").strip().partition("\n")[0].strip()


def read(module: str) -> str | None:
    """Return the module's source, or None where its loader has none."""
    spec = find_spec(module)
    get_source = getattr(spec.loader, "get_source", None) if spec else None
    return get_source(module) if get_source else None


@lru_cache(maxsize=64)
def _tree(text: str) -> ast.Module:
    return ast.parse(text)


def _bound(tree: ast.Module) -> set[str] | None:
    """The names that a module's own code binds, in any branch of it; None where it may bind others, too."""
    names: set[str] = set()
    for node in _outside_functions(tree):
        if isinstance(node, ast.Name):
            if node.id in _BINDS_UNSEEN:
                return None
            if isinstance(node.ctx, ast.Store):
                names.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            names.add(node.name)
    declared = (name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names)
    names.update(declared)
    return None if names & {"*", *_BINDS_UNSEEN} else names


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    """Every node of a module but those inside functions and classes."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, _SCOPES):
            yield from _outside_functions(child)


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
    tree = _tree(source)
    scope: ast.AST | None = tree
    for part in attr.split("."):
        scope = _definition(scope, part)
    if isinstance(scope, ast.ImportFrom) and hops:
        names = {alias.asname or alias.name: alias.name for alias in scope.names}
        return _summary(_absolute(module, scope), names[attr], hops - 1)
    own = ast.get_docstring(scope) if isinstance(scope, (ast.ClassDef, ast.FunctionDef)) else None
    return first_line(own or ast.get_docstring(tree))


def _declares(module: str, attr: str, name: str, hops: int) -> bool:
    source = read(module)
    if source is None:
        return False
    tree = _tree(source)
    scope: ast.AST | None = tree
    for part in attr.split("."):
        scope = _definition(scope, part)
    if isinstance(scope, ast.ImportFrom) and hops:
        names = {alias.asname or alias.name: alias.name for alias in scope.names}
        return _declares(_absolute(module, scope), names[attr], name, hops - 1)
    inside = scope.body if isinstance(scope, ast.ClassDef) else []
    below = any(_sets_true(node, f"{attr}.{name}") for node in tree.body)
    return below or any(_sets_true(node, name) for node in inside)


def _sets_true(node: ast.AST, name: str) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    value = getattr(node, "value", None)
    return isinstance(value, ast.Constant) and value.value is True and any(ast.unparse(t) == name for t in targets)


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
