"""Fail unless every public name, and every public member of it, has a declared and known type."""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGES = ("topk_registry", "topk_export")


def public_prefixes(package: str) -> tuple[str, ...]:
    homes = getattr(importlib.import_module(package), "_HOMES", {})
    return tuple(f"{package}.{home}.{name}" for name, home in homes.items())


def untyped(package: str) -> list[str]:
    # pyright finds the package as a stranger's program would: in the environment, from an unrelated folder
    environment = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    command = ["pyright", "--outputjson", "--ignoreexternal", "--verifytypes", package]
    with tempfile.TemporaryDirectory() as elsewhere:
        result = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True)
    report = json.loads(result.stdout)["typeCompleteness"]
    prefixes = public_prefixes(package)
    public = [s for s in report["symbols"] if any(f"{s['name']}.".startswith(f"{p}.") for p in prefixes)]
    if prefixes and not public:
        raise SystemExit(f"pyright found none of {package}'s {len(prefixes)} public names\n{result.stdout}")
    wrong = [s for s in public if not s["isTypeKnown"] or s["isTypeAmbiguous"]]
    print(f"{package}: {len(public)} public symbols, {len(wrong)} without a declared type")
    return [f"{s['name']}: {d['message']}" for s in wrong for d in s["diagnostics"]]


if __name__ == "__main__":
    problems = [problem for package in PACKAGES for problem in untyped(package)]
    raise SystemExit("\n".join(problems) or 0)
