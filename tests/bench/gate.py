"""A time is worth printing only if the thing timed is right: the tests run first, in a process of their own."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

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
