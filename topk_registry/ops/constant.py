"""Choices that a compiled graph keeps as constants. Import it only while a graph is traced: it imports the compiler."""

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.assume_constant_result
def choose(choice: Callable[..., Any], *args: Any) -> Any:
    """``choice(*args)``, made once while the graph is traced: how a backend is chosen is no part of the graph."""
    return choice(*args)
