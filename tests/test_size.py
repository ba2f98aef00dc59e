"""A ceiling on the statements of Python per package, so that code that is removed stays removed."""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

CEILINGS = {
    "benchmarks": 1363,
    "docs": 823,
    "export/topk_export": 3792,
    "plugins/template": 25,
    "plugins/topk_plugins": 1124,
    "plugins/topk_studies": 1857,
    "tests": 15319,
    "topk_registry/*.py": 169,
    "topk_registry/cli": 344,
    "topk_registry/conformal": 243,
    "topk_registry/data": 605,
    "topk_registry/distributions": 193,
    "topk_registry/losses": 287,
    "topk_registry/metrics": 208,
    "topk_registry/ops": 3591,
    "topk_registry/nn": 738,
    "topk_registry/registry": 387,
    "topk_registry/testing": 804,
    "topk_registry/train": 2514,
}


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def statements(source: str) -> int:
    """Count statements without docstrings. An assignment of a tuple to a tuple counts one per element."""
    count = 0
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.stmt) or is_docstring(node):
            continue
        count += 1
        pair = isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
        if pair and isinstance(node.targets[0], ast.Tuple):
            count += len(node.value.elts) - 1
    return count


def statements_in(place: Path) -> int:
    files = [place] if place.is_file() else place.rglob("*.py")
    return sum(statements(file.read_text(encoding="utf-8")) for file in files)


@cache
def packages() -> dict[str, int]:
    """Statements by package: everything below the folder, or the files at the top of it if packages are below."""
    core = ROOT / "topk_registry"
    folders = [each for each in core.iterdir() if (each / "__init__.py").is_file()]
    counts = {f"topk_registry/{each.name}": statements_in(each) for each in folders}
    counts["topk_registry/*.py"] = sum(statements_in(file) for file in core.glob("*.py"))
    for place in ("plugins/topk_plugins", "plugins/topk_studies", "plugins/template", "export/topk_export"):
        counts[place] = statements_in(ROOT / place)
    for place in ("docs", "benchmarks", "tests"):
        counts[place] = statements_in(ROOT / place)
    return {name: count for name, count in counts.items() if count}


@pytest.mark.parametrize("package", CEILINGS)
def test_a_package_stays_below_its_ceiling(package):
    assert packages()[package] <= CEILINGS[package]


def test_the_table_has_all_packages():
    assert set(CEILINGS) == set(packages())


def test_statements_are_counted_without_docstrings_and_tuples_count_per_element():
    source = '"""Docstring."""\na, b = 1, 2\n\ndef f(x):\n    """Docstring."""\n    if x:\n        return 1\n'
    assert statements(source) == 5
