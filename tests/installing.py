"""Build and install distributions, without a network."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
OFFLINE = ["--no-deps", "--no-index", "--no-build-isolation", "--quiet"]


def run(*argv, check=True, **options):
    result = subprocess.run([*map(str, argv)], capture_output=True, text=True, timeout=300, **options)
    if check and result.returncode:
        pytest.fail(f"{argv} failed with {result.returncode}\n{result.stdout}{result.stderr}")
    return result
