"""Import directions, by import-linter's contracts in pyproject.toml, and whether every module can be imported."""

import os
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import walk_packages

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ("topk_registry", "plugins", "export")
# an import that a contract forbids: (file, statement)
VIOLATIONS = {
    "packages": ("topk_registry/train/command.py", "from topk_export import Predictor"),
    "core": ("topk_registry/registry/registry.py", "from topk_registry.losses import base"),
    "light": ("topk_registry/registry/source.py", "import yaml"),
    "runtime": ("export/topk_export/runtime/session.py", "import onnx"),
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
        timeout=300,
    )
    return result.returncode, result.stdout + result.stderr


@pytest.mark.slow
def test_all_contracts_hold():
    status, report = lint(ROOT)
    assert status == 0, report


@pytest.mark.slow
@pytest.mark.parametrize("contract", sorted(VIOLATIONS))
def test_a_forbidden_import_is_found(tmp_path, contract):
    file, statement = VIOLATIONS[contract]
    for name in (*SOURCES, "tests/contracts.py", "tests/__init__.py", "pyproject.toml"):
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, target)
    with (tmp_path / file).open("a") as changed:
        changed.write(f"\n{statement}\n")
    status, report = lint(tmp_path, contract)
    assert status == 1
    assert statement.split()[1].partition(".")[0] in report


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
