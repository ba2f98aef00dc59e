"""Choices that a compiled graph keeps as constants. Import it only while a graph is traced: it imports the compiler."""

from typing import Any

import torch

from topk_registry.ops.backend import operator


@torch.compiler.assume_constant_result
def choose(name: str, *request: Any) -> str:
    """Choose the backend of an operator once, while the graph is traced."""
    return operator(name).choose(*request)
