"""Results that a compiled graph keeps as constants."""

from collections.abc import Callable
from typing import Any, TypeVar

from topk_registry.ops.backend import operator

Function = TypeVar("Function", bound=Callable)


def constant_result(function: Function) -> Function:
    """Decorate a function whose result a compiled graph keeps.

    It is ``torch.compiler.assume_constant_result``, which would import the compiler, for two seconds.
    """
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


@constant_result
def choose(name: str, *request: Any) -> str:
    """Choose the backend of an operator once, while the graph is traced."""
    return operator(name).choose(*request)
