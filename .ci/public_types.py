"""Fail unless every public name, and every public member of it, has a declared and known type."""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

PACKAGES = ("topk_registry", "topk_export")
NAMESPACES = ("topk_registry.functional", "topk_registry.rows", "topk_registry.options", "topk_registry.errors")


def definitions(package: str) -> tuple[str, ...]:
    """Where each public name is defined, which pyright reports on, behind whatever re-exports it."""
    modules = [importlib.import_module(name) for name in (package, *NAMESPACES) if name.startswith(package)]
    values = [getattr(module, name) for module in modules for name in getattr(module, "__all__", dir(module))]
    public = [value for value in values if not isinstance(value, (ModuleType, str))]
    return tuple(f"{value.__module__}.{value.__qualname__}" for value in public)


def untyped(package: str) -> list[str]:
    # pyright finds the package as a stranger's program would: in the environment, from an unrelated folder
    environment = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    command = ["pyright", "--outputjson", "--ignoreexternal", "--verifytypes", package]
    with tempfile.TemporaryDirectory() as elsewhere:
        result = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True)
    report = json.loads(result.stdout)["typeCompleteness"]
    wanted = definitions(package)
    public = [s for s in report["symbols"] if any(f"{s['name']}.".startswith(f"{name}.") for name in wanted)]
    if unseen := set(wanted) - {s["name"] for s in public}:
        raise SystemExit(f"pyright found nothing on {', '.join(sorted(unseen))}\n{result.stdout}")
    wrong = [s for s in public if not s["isTypeKnown"] or s["isTypeAmbiguous"]]
    print(f"{package}: {len(public)} public symbols, {len(wrong)} without a declared type")
    return [f"{s['name']}: {d['message']}" for s in wrong for d in s["diagnostics"] or [{"message": "see its members"}]]


if __name__ == "__main__":
    problems = [problem for package in PACKAGES for problem in untyped(package)]
    raise SystemExit("\n".join(problems) or 0)
