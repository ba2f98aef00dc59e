"""Functions that kernels call, for tests to call."""

from functools import cache
from typing import Any

from numba import njit


@cache
def for_python(function: Any) -> Any:
    """The same function compiled once more: one that was compiled for kernels cannot be called from Python."""
    return njit(error_model="numpy", fastmath={"contract"})(function.py_func)
