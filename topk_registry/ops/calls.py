"""Skip signature binding in ``Function.apply``."""

import inspect
from types import SimpleNamespace
from typing import TypeVar

import torch

Function = TypeVar("Function", bound=type[torch.autograd.Function])


def skip_signature_binding(function: Function) -> Function:
    """Decorate a Function whose ``apply`` is given all arguments of ``forward``, by position.

    At every call torch looks up forward's signature and binds the arguments to it, to fill in defaults. That takes as
    long as the rest of the call. With this signature arguments are taken as they come.
    """
    forward = function.forward
    forward.__signature__ = _AsTheyCome(list(inspect.signature(forward).parameters.values()))  # pyright: ignore[reportFunctionMemberAccess]
    return function


class _AsTheyCome(inspect.Signature):
    def bind(self, *args, **kwargs):  # pyright: ignore[reportIncompatibleMethodOverride]
        return SimpleNamespace(args=args, kwargs=kwargs, apply_defaults=_nothing)


def _nothing() -> None:
    pass
