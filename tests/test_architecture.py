"""Import directions by import-linter's contracts in pyproject.toml, imports of all modules, and golf."""

import ast
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import walk_packages

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ("topk_registry", "plugins", "export")
# an import that a contract forbids: (file, statement, what the report says)
VIOLATIONS = {
    "packages": (
        "topk_registry/train/command.py",
        "from topk_export import Predictor",
        "topk_registry.train.command -> topk_export (",
    ),
    "core": (
        "topk_registry/registry/registry.py",
        "from topk_registry.losses import base",
        "topk_registry.registry.registry -> topk_registry.losses.base (",
    ),
    "light": ("topk_registry/registry/source.py", "import yaml", "topk_registry.registry.source imports yaml"),
    "runtime": ("export/topk_export/runtime/session.py", "import onnx", "topk_export.runtime.session imports onnx"),
}


@pytest.mark.slow
def test_forbidden_imports_are_found(tmp_path):
    """In a copy of the sources. The gate runs import-linter on the sources themselves."""
    for name in (*SOURCES, "tests/contracts.py", "tests/__init__.py", "pyproject.toml"):
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, target)
    for file, statement, _ in VIOLATIONS.values():
        with (tmp_path / file).open("a") as changed:
            changed.write(f"\n{statement}\n")
    options = [word for contract in VIOLATIONS for word in ("--contract", contract)]
    code = "from importlinter.cli import lint_imports_command as lint; lint()"
    path = os.pathsep.join(str(tmp_path / source) for source in (".", "plugins", "export"))
    result = subprocess.run(
        [sys.executable, "-c", code, "--no-cache", "--no-logo", *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    report = result.stdout + result.stderr
    assert result.returncode == 1, report
    assert report.count(" BROKEN") == len(VIOLATIONS), report
    assert all(line in report for _, _, line in VIOLATIONS.values()), report


@pytest.mark.parametrize("package", ["topk_registry", "topk_export", "topk_plugins", "topk_studies"])
def test_every_module_can_be_imported(package):
    modules = walk_packages(import_module(package).__path__, f"{package}.")
    names = [module.name for module in modules if not module.name.endswith(".__main__")]  # which runs the command
    for name in names:
        try:
            import_module(name)
        except ModuleNotFoundError as error:
            if find_spec(str(error.name).partition(".")[0]):  # not an optional dependency that is missing here
                raise


CODE = ("benchmarks", "docs", "export", "plugins", "tests", "topk_registry")
# tuple assignments, := in f-strings and nested conditional expressions per package; a number may only fall
GOLF = {
    "benchmarks": 5,
    "docs": 3,
    "export/topk_export": 13,
    "plugins/topk_studies": 13,
    "tests/conformal": 2,
    "tests/data": 1,
    "tests/deploy": 3,
    "tests/export": 9,
    "tests/metrics": 1,
    "tests/ops": 8,
    "tests/studies": 1,
    "tests/train": 3,
    "topk_registry/cli": 2,
    "topk_registry/data": 3,
    "topk_registry/distributions": 1,
    "topk_registry/metrics": 2,
    "topk_registry/ops": 44,
    "topk_registry/train": 16,
}


def is_golf(node: ast.AST) -> bool:
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
            exchanged = sorted(map(ast.unparse, names)) == sorted(map(ast.unparse, values))
            return not exchanged and (len(names) > 2 or node.lineno != node.end_lineno)
        case ast.JoinedStr():
            return any(isinstance(part, ast.NamedExpr) for part in ast.walk(node))
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return any(isinstance(part, ast.IfExp) for part in (test, body, orelse))
    return False


def golf(source: str) -> Iterator[int]:
    """Yield the lines of tuple assignments, assignments in f-strings, and conditional expressions in each other.

    A tuple assignment counts if it has more than two elements or lines. An exchange such as ``a, b, c = b, c, a`` does
    not count.
    """
    for node in ast.walk(ast.parse(source)):
        if is_golf(node):
            yield node.lineno


def package_of(file: Path) -> str:
    parts = file.relative_to(ROOT).parts
    return parts[0] if parts[0] in ("benchmarks", "docs") or len(parts) == 2 else "/".join(parts[:2])


def test_golf_stays_below_its_ceiling():
    found = defaultdict(list)
    for folder in CODE:
        for file in sorted((ROOT / folder).rglob("*.py")):
            places = (f"{file.relative_to(ROOT)}:{line}" for line in golf(file.read_text(encoding="utf-8")))
            found[package_of(file)] += places
    above = {package: places for package, places in found.items() if len(places) > GOLF.get(package, 0)}
    assert not above, f"more tuple assignments, := in f-strings or nested conditional expressions than allowed: {above}"


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("a, b, c = 1, x.y, 2", [1]),
        ("a, b = (\n    1,\n    2,\n)", [1]),
        ("text = f'{(n := 1)} of {n}'", [1]),
        ("\nx = 1 if a else 2 if b else 3", [2]),
        ("a, b = 1, 2", []),
        ("a, b, c = b, c, a", []),
        ("a, b, c = pair()", []),
        ("x = 1 if f(2 if a else 3) else 4", []),
    ],
)
def test_golf_is_found(source, lines):
    assert list(golf(source)) == lines
