"""Results and numbers that a compiled graph keeps as constants."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from topk_registry.ops.backend import Operator, operator

Function = TypeVar("Function", bound=Callable)


def constant_result(function: Function) -> Function:
    """Decorate a function whose result a compiled graph keeps.

    It is ``torch.compiler.assume_constant_result``, which would import the compiler, for two seconds.
    """
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


def choose(operator: Operator, *request: Any) -> str:
    """Choose the backend of an operator; in a graph once, while it is traced."""
    return _in_graph(operator.name, *request) if torch.compiler.is_compiling() else operator.choose(*request)


@constant_result
def _in_graph(name: str, *request: Any) -> str:
    return operator(name).choose(*request)


def fixed_number(number: float) -> float:
    """A number, as a constant of the graph where one is compiled.

    After a second value ``torch.compile`` makes the float symbolic, but operators burn in its value. The cache of
    compiled code sees the symbol only, so a third value would run the second one's code.
    """
    if not torch.compiler.is_compiling() or not isinstance(number, float):
        return number
    from torch.fx.experimental.symbolic_shapes import guard_scalar  # it brings in the compiler

    return guard_scalar(number)  # pyright: ignore[reportReturnType]
