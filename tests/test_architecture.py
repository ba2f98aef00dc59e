"""Import directions, by import-linter's contracts in pyproject.toml, and what only the syntax tree can tell."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

import topk_registry
from topk_registry import errors, functional, options, rows

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = ("topk_registry", "plugins/topk_plugins", "plugins/topk_studies", "export/topk_export")
CONTRACTS = {contract["id"]: contract for contract in PROJECT["tool"]["importlinter"]["contracts"]}

# an import that each contract forbids: (file, statement)
VIOLATIONS = {
    "doors": ("topk_registry/train/command.py", "from topk_export import Predictor"),
    "core": ("topk_registry/registry/api.py", "from topk_registry.losses import base"),
    "train": ("topk_registry/train/setup/preflight.py", "from topk_registry.train.engine import run"),
    "export": ("export/topk_export/runtime/predictor.py", "from topk_export.serve import app"),
    "models-only": ("export/topk_export/export.py", "def late():\n    import topk_registry.ops.ksubset"),
    "light": ("topk_registry/registry/source.py", "import yaml"),
    "light-indirect": ("topk_registry/cli/main.py", "import topk_registry.cli.check"),
    "executors": ("topk_registry/executors/local.py", "import numpy"),
    "folders": ("topk_registry/folders/images.py", "import torch"),
    "pages": ("topk_registry/pages/plots.py", "import numpy"),
    "analysis": ("topk_registry/analysis/measures.py", "import scipy.stats"),
    "operators": ("topk_registry/ops/hinge.py", "import scipy.special"),
    "inside-operators": ("topk_registry/ops/lapsum/api.py", "from topk_registry.ops.sparse import api"),
    "kernels": ("topk_registry/nn/head.py", "import triton"),
    "plugins": ("plugins/topk_plugins/hinge.py", "import timm"),
    "runtime": ("export/topk_export/runtime/session.py", "import onnx"),
    "runtime-indirect": ("export/topk_export/errors.py", "import torch"),
}


def lint(folder: Path, *contracts: str) -> tuple[int, str]:
    """The status and the report of import-linter over the sources in a folder."""
    options = [word for contract in contracts for word in ("--contract", contract)]
    code = "from importlinter.cli import lint_imports_command as lint; lint()"
    path = os.pathsep.join(str(folder / source) for source in (".", "plugins", "export"))
    result = subprocess.run(
        [sys.executable, "-c", code, "--no-cache", "--no-logo", *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    return result.returncode, result.stdout + result.stderr


def test_the_contracts_are_kept():
    status, report = lint(ROOT)
    assert status == 0, report


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The sources, where a test may break them."""
    folder = tmp_path_factory.mktemp("sources")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "tests").mkdir()
    (folder / "tests/__init__.py").touch()
    shutil.copy(ROOT / "tests/contracts.py", folder / "tests")
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.slow
def test_each_contract_can_fail(copy, contract):
    file, statement = VIOLATIONS[contract]
    before = (copy / file).read_text()
    try:
        (copy / file).write_text(f"{before}\n{statement}\n")
        status, report = lint(copy, contract)
    finally:
        (copy / file).write_text(before)
    assert status == 1, report
    assert f"{CONTRACTS[contract]['name']} BROKEN" in re.sub(r"\s+", " ", report)


@pytest.mark.parametrize("package", [package.split("/")[-1] for package in PACKAGES])
def test_no_files_import_in_a_circle(package):
    graph = grimp.build_graph(package, exclude_type_checking_imports=True, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert list(TopologicalSorter(imports).static_order())  # a CycleError names the circle


def test_a_circle_of_files_is_found():
    with pytest.raises(CycleError, match="cycle"):
        list(TopologicalSorter({"a": {"b"}, "b": {"a"}}).static_order())


FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def files_of(folder: str) -> list[Path]:
    return [path for path in FILES if path.is_relative_to(ROOT / folder)]


PUBLIC = {"topk_registry": set(dir(topk_registry))}  # names by namespace, for plug-ins to import
PUBLIC |= {module.__name__: set(module.__all__) for module in (errors, functional, options, rows)}


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_plugins_use_public_names_only():
    for path in files_of("plugins/topk_plugins"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "topk_registry":
                assert node.module in PUBLIC, f"{label(path)} imports {node.module}, which is not public"
                hidden = {alias.name for alias in node.names} - PUBLIC[node.module]
                assert not hidden, f"{label(path)} imports {hidden}, which {node.module} does not make public"


TESTS = sorted(path for folder in ("tests", "plugins/template/tests") for path in (ROOT / folder).rglob("*.py"))


def imported_tests(source: str) -> list[str]:
    """The test modules that a file imports, or that the code in its strings imports."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module or "", *(alias.name for alias in node.names if not node.module or node.level)]
            found += [alias.name for alias in node.names if (node.module or "").split(".")[0] == "tests"]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found += re.findall(r"^ *(?:from|import) +(tests\.[\w.]+)", node.value, re.MULTILINE)
    return [name for name in found if name.split(".")[-1].startswith("test_")]


def test_no_test_module_is_imported():
    found = {label(path): names for path in TESTS if (names := imported_tests(path.read_text()))}
    assert not found, f"cases that several files need belong in a module without tests: {found}"


@pytest.mark.parametrize(
    "statement",
    [
        "from tests.losses.{} import CASES",
        "from tests.losses import {}",
        "from .{} import CASES",
        "from . import {}",
        "import tests.losses.{} as fused",
        "CODE = 'import sys\\nfrom tests.losses.{} import lock'",
    ],
)
def test_an_imported_test_module_is_found(statement):
    (found,) = imported_tests(statement.format("test_fused"))
    assert found.endswith("test_fused")
    assert not imported_tests(statement.format("fused"))


def test_the_exporter_leaves_the_mathematics_to_the_head():
    tree = ast.parse((ROOT / "export/topk_export/export.py").read_text())
    assert "topk_registry.nn.head" in [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]


def strings(path: Path) -> Iterator[str]:
    """Every string of a file that is no docstring."""
    tree = ast.parse(path.read_text())
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


@pytest.mark.parametrize("folder", ["topk_registry", "export/topk_export"])
def test_the_core_names_no_loss(folder):
    names = set(PROJECT["project"]["entry-points"]["topk_registry.losses"])
    names -= PUBLIC["topk_registry"] | PUBLIC["topk_registry.functional"]  # a function may share its name with a loss
    found = {label(path): named for path in files_of(folder) if (named := names & set(strings(path)))}
    assert not found


@pytest.mark.slow
def test_operators_import_no_kernel_compiler_until_one_is_used():
    packages = [path.parent for path in files_of("topk_registry/ops") if path.name == "__init__.py"]
    operators = [".".join(p.relative_to(ROOT).parts) for p in packages if p.name not in ("numba", "triton")]
    code = (
        "import sys, torch; before = set(sys.modules)\n"
        f"for name in {operators!r}: __import__(name)\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before} & {'numba', 'triton'}\n"
        "raise SystemExit(f'imported {new}' if new else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
