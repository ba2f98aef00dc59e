"""The files of the checkout, for tests that build or install it."""

import shutil
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEFT_OUT = (".git", ".venv", "__pycache__", "output", "_build", "generated", "*_cache", "dist")


def copy_to(folder: Path) -> None:
    """Copy the checkout without what was built in it."""
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*LEFT_OUT))
