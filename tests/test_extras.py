"""Extras that messages, pages and other extras name are those of pyproject.toml, so that ``pip install`` finds them."""

import ast
import re
import sys
from importlib.metadata import metadata, packages_distributions, requires
from pathlib import Path

from topk_registry.registry.discovery import normalize

ROOT = Path(__file__).parents[1]
NAMED = re.compile(r"(?:topk-registry|--editable \"?\.|-e \"?\.)\[([a-z,-]+)\]")


def test_every_extra_that_is_named_exists():
    known = set(metadata("topk-registry").get_all("Provides-Extra") or ())
    folders = ("topk_registry", "export", "plugins", "docs", "tests", ".github")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".md", ".yml"}]
    named = {
        (path.name, extra)
        for path in [*files, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "pyproject.toml"]
        for extras in NAMED.findall(path.read_text(encoding="utf-8"))
        for extra in extras.split(",")
    }
    assert ("README.md", "test") in named
    assert not {(file, extra) for file, extra in named if extra not in known}


def test_errors_name_an_installation_that_works_in_a_checkout():
    """No index has the package, so `pip install 'topk-registry[onnx]'` cannot work."""
    for folder in ("topk_registry", "export", "plugins"):
        for path in (ROOT / folder).rglob("*.py"):
            assert "install 'topk-registry[" not in path.read_text(encoding="utf-8"), path


def test_the_gate_types_the_quickstart_after_the_set_up_of_the_readme():
    gate = (ROOT / ".ci" / "run").read_text()
    assert '--editable ".[all]"' in (ROOT / "README.md").read_text().partition("<!-- ci: set-up -->")[2].split("```")[1]
    steps = ['bash -euc "$setup"', "--check --no-warnings docs/quickstart.md", 'bash -euc "$tests"']
    places = [gate.index(step) for step in steps]
    assert places == sorted(places)


# come with torch, timm, numba and fastapi; pytest and the last two are imported only where they are installed
INDIRECT = {"triton", "typing_extensions", "torchvision", "safetensors", "llvmlite", "starlette"}
INDIRECT |= {"pytest", "pillow_heif", "wandb"}


def imported(path: Path) -> set[str]:
    """Return the packages that a file imports."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.append(node.module or "")
    return {name.partition(".")[0] for name in names}


def test_packages_import_what_users_install():
    """The gate installs the other extras while it types the quickstart, which may not notice a missing package."""
    developers = re.compile(r"extra == .(?:test|lint|docs|peers)\b")
    users = [line for line in requires("topk-registry") or () if not developers.search(line)]
    names = {normalize(re.match(r"[\w-]+", line)[0]) for line in users}
    declared = {name for name, owners in packages_distributions().items() if names & {*map(normalize, owners)}}
    for folder in ("topk_registry", "plugins/topk_plugins", "export/topk_export"):
        for path in (ROOT / folder).rglob("*.py"):
            others = imported(path) - sys.stdlib_module_names - INDIRECT
            assert {name for name in others if not name.startswith("topk_")} <= declared, path
