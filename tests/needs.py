"""What a machine may lack: its tests are skipped, and fail where continuous integration has installed it."""

import os
from importlib import import_module
from typing import Any, NoReturn

import pytest


def lack(reason: str, *, installed_in_ci: bool = True) -> NoReturn:
    """Skip the test. Under CI, fail it, because there a skipped test would hide a broken installation."""
    if installed_in_ci and os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason, allow_module_level=True)


def package(name: str, extra: str = "test") -> Any:
    """Import a module of a package of an extra."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        lack(f"{error} (extra {extra})")
