"""Who may import whom, read from the source: imports inside functions count, those under TYPE_CHECKING do not run."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import topk_registry

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
SOURCES = {"": ROOT, "plugins": ROOT / "plugins", "export": ROOT / "export"}
FILES = sorted(
    path
    for package in ("topk_registry", "plugins/topk_plugins", "plugins/topk_studies", "export/topk_export")
    for path in (ROOT / package).rglob("*.py")
)
FOUNDATION = {
    "topk_registry",
    "topk_registry.__main__",
    *(f"topk_registry.cli{name}" for name in ("", ".commands", ".doctor", ".losses", ".main", ".parser")),
    *(
        f"topk_registry.registry{name}"
        for name in ("", ".api", ".discovery", ".environment", ".errors", ".options", ".registry", ".source")
    ),
    "topk_registry.registry.timm_losses",
}
KERNEL_COMPILERS = {"numba", "triton"}
OURS = ("topk_registry", "topk_plugins", "topk_studies", "topk_export")


def module_of(path: Path) -> str:
    relative = path.relative_to(ROOT)
    parts = relative.parts[1:] if relative.parts[0] in ("plugins", "export") else relative.parts
    name = ".".join(parts)[: -len(".py")]
    return name.removesuffix(".__init__")


def imports(path: Path) -> Iterator[tuple[str, str | None]]:
    """(module, name) of ``from module import name``, (module, None) of ``import module``."""
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    for node in running(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*up, *([node.module] if node.module else [])])
            yield from ((module, alias.name) for alias in node.names)


def running(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for alternative in node.orelse:
                yield from running(alternative)
            continue
        yield node
        yield from running(node)


def targets(path: Path) -> set[str]:
    """Modules that are imported; ``from package import module`` is the module where there is one."""
    modules = {module_of(file) for file in FILES}
    return {f"{module}.{name}" if name and f"{module}.{name}" in modules else module for module, name in imports(path)}


def files_of(*prefixes: str) -> list[Path]:
    return [path for path in FILES if any((module_of(path) + ".").startswith(prefix + ".") for prefix in prefixes)]


MODELS = ("topk_registry.nn.head", "topk_registry.nn.classifier", "topk_registry.train.setup")


def label(path: Path) -> str:
    return module_of(path)


@pytest.mark.parametrize("path", [path for path in FILES if module_of(path) in FOUNDATION], ids=label)
def test_the_registry_imports_the_standard_library_only(path):
    outside = {t for t in targets(path) if t.split(".")[0] not in sys.stdlib_module_names}
    assert outside <= FOUNDATION


@pytest.mark.parametrize("path", files_of("topk_registry.ops"), ids=label)
def test_operators_import_torch_and_each_other(path):
    for target in targets(path):
        top = target.split(".")[0]
        known = top in {"torch", "numpy", *KERNEL_COMPILERS} or top in sys.stdlib_module_names
        assert known or target.startswith("topk_registry.ops"), target


@pytest.mark.parametrize("path", files_of("topk_registry", "topk_export"), ids=label)
def test_nothing_imports_the_plugins(path):
    assert not {target for target in targets(path) if target.split(".")[0] == "topk_plugins"}


@pytest.mark.parametrize("path", files_of("topk_registry"), ids=label)
def test_the_core_does_not_reach_for_the_export_package(path):
    assert not {target for target in targets(path) if target.split(".")[0] == "topk_export"}


@pytest.mark.parametrize("path", [p for p in FILES if "topk_registry.ops" not in module_of(p)], ids=label)
def test_only_operators_compile_kernels(path):
    assert not {target for target in targets(path) if target.split(".")[0] in KERNEL_COMPILERS}


@pytest.mark.parametrize("path", files_of("topk_plugins"), ids=label)
def test_plugins_use_public_names_only(path):
    for module, name in imports(path):
        if module.split(".")[0] in ("topk_registry", "topk_export"):
            assert module == "topk_registry", f"a plug-in imports {module}, not a public name"
            assert name in topk_registry.__all__, f"topk_registry.{name} is not public"


@pytest.mark.parametrize("path", files_of("topk_export"), ids=label)
def test_export_imports_public_names_and_what_models_are_made_of(path):
    for module, name in imports(path):
        if module == "topk_registry":
            assert name in topk_registry.__all__
        elif module.split(".")[0] == "topk_registry":
            assert module in ("topk_registry.cli", *MODELS), module


def test_the_exporter_leaves_the_mathematics_to_the_head():
    assert "topk_registry.nn.head" in targets(ROOT / "export" / "topk_export" / "conversion" / "to_onnx.py")


def reached(name: str) -> list[Path]:
    """The file of a module of topk_export, and those of the modules of topk_export that importing it imports."""
    files = {module_of(path): path for path in FILES}
    found, todo = [], [name]
    while todo:
        path = files[todo.pop()]
        if path not in found:
            found.append(path)
            todo += [target for target in targets(path) if target in files and target.startswith("topk_export")]
    return sorted(found)


@pytest.mark.parametrize("path", reached("topk_export.runtime.predictor"), ids=label)
def test_the_predictor_needs_neither_torch_nor_the_core(path):
    allowed = {"numpy", "onnxruntime", "PIL", "topk_export"} | set(sys.stdlib_module_names)
    assert {target.split(".")[0] for target in targets(path)} <= allowed


def strings(path: Path) -> Iterator[str]:
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


STUDIES = files_of("topk_studies")


@pytest.mark.parametrize("path", [p for p in FILES if p not in STUDIES], ids=label)
def test_nothing_imports_the_studies(path):
    assert not [target for target in targets(path) if target.startswith("topk_studies")]


CORE = [p for p in files_of("topk_registry", "topk_export") if p not in STUDIES]


@pytest.mark.parametrize("path", CORE, ids=label)
def test_the_core_names_no_loss(path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = set(project["entry-points"]["topk_registry.losses"])
    public = set(topk_registry.__all__)  # a function may share its name with a loss
    assert not (names - public) & set(strings(path))


def test_operators_import_no_kernel_compiler_until_one_is_used():
    packages = [path for path in files_of("topk_registry.ops") if path.name == "__init__.py"]
    operators = [module_of(path) for path in packages if path.parent.name not in ("numba", "triton")]
    code = (
        "import sys, torch; before = set(sys.modules)\n"
        f"for name in {operators!r}: __import__(name)\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before} & {'numba', 'triton'}\n"
        "raise SystemExit(f'imported {new}' if new else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
