"""A time is worth printing only if the thing timed is right: the tests run first, in a process of their own."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


class RefusedError(Exception):
    """The tests do not pass, so nothing is measured."""


def require_green(tests: Sequence[str]) -> None:
    """Run the tests at these paths, and raise :class:`RefusedError` with their last lines unless all pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", *tests]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        tail = "\n".join(done.stdout.splitlines()[-30:])
        raise RefusedError(f"{tail}\n\nno report: the tests in {', '.join(tests)} do not pass (exit {done.returncode})")
