"""A time is worth printing only if the thing timed is right: the tests run first, in a process of their own."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]


def green(tests: Sequence[str]) -> bool:
    """Whether the tests at these paths pass; where they do not, their last lines go to stderr."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", *tests]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        tail = "\n".join(done.stdout.splitlines()[-30:])
        told = f"no report: the tests in {', '.join(tests)} do not pass (exit {done.returncode})"
        print(f"{tail}\n\n{told}", file=sys.stderr)
    return done.returncode == 0


def outcome(junit: Path) -> dict[str, Any]:
    """Count the tests of a report that pytest wrote (``--junit-xml``), and name those that failed; none without it.

    Where pytest was interrupted the report has the tests until then, and ``cut_off`` says so.
    """
    passed, failed, skipped, cut_off = 0, [], 0, False
    if not junit.is_file():
        return {"passed": passed, "failed": failed, "skipped": skipped}
    for case in ElementTree.parse(junit).iter("testcase"):
        kinds = {child.tag for child in case}
        if (case.get("classname"), case.get("name")) == ("pytest", "internal"):
            cut_off = True
        elif kinds & {"failure", "error"}:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif "skipped" in kinds:
            skipped += 1
        else:
            passed += 1
    found = {"passed": passed, "failed": failed, "skipped": skipped}
    return {**found, "cut_off": True} if cut_off else found


def is_green(tests: Mapping[str, Any]) -> bool:
    """Whether an outcome lets a number be published."""
    return tests["passed"] > 0 and not tests["failed"]
