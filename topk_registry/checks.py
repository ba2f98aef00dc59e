"""Functions that check an option of a loss, and return its value or raise a ValueError that names the option."""

import math
import reprlib
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["choice", "integer", "number", "numbers"]

LARGEST = 2**31 - 1  # largest integer that an option may be; kernels add and multiply such integers in 64 bits


def number(
    value: Any,
    name: str,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
) -> float:
    """Return an option as a float. Raise a ValueError unless the option is a finite number within the bounds.

    The value may be a tensor []. Booleans and text are not allowed.

    Example:
        >>> number(1, "tau", above=0)
        1.0
        >>> number("x", "tau", above=0)
        Traceback (most recent call last):
        ValueError: tau must be a finite number above 0, got 'x'
    """
    if (
        type(value) is float
        and -math.inf < value < math.inf
        and (above is None or value > above)
        and (at_least is None or value >= at_least)
        and (below is None or value < below)
        and (at_most is None or value <= at_most)
    ):
        return value  # a fast path, because some losses check numbers in every call
    bounds = _Bounds(above, at_least, below, at_most)
    given = value.item() if isinstance(value, Tensor) and value.ndim == 0 else value
    if isinstance(given, bool) or not isinstance(given, Real) or not _is_finite(given) or not bounds.contains(given):
        raise ValueError(f"{name} must be {bounds.describe('a finite number')}, got {shown(value)}")
    return float(given)


def integer(value: Any, name: str, *, at_least: int | None = None, at_most: int = LARGEST) -> int:
    """Return an option as an int. Raise a ValueError unless the option is an integer within the bounds.

    Example:
        >>> integer(2.5, "k", at_least=1)
        Traceback (most recent call last):
        ValueError: k must be an integer of at least 1, got 2.5
    """
    if type(value) is int and (at_least is None or value >= at_least) and -at_most <= value <= at_most:
        return value
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or (at_least is not None and value < at_least):
        raise ValueError(f"{name} must be {_Bounds(at_least=at_least).describe('an integer')}, got {shown(value)}")
    if not -at_most - 1 <= int(value) <= at_most:
        least = -at_most - 1 if at_least is None else int(at_least)
        raise ValueError(f"{name} must be an integer from {least} to {at_most}, got {value!r}")
    return int(value)


def numbers(
    value: Any,
    name: str,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    or_one: bool = False,
) -> Tensor:
    """Return an option with one number per class as a new float64 tensor [n].

    Raise a ValueError unless all numbers are finite and within the bounds. If ``or_one`` is True, the value may also be
    one number for all classes, and the result is a tensor [].

    Example:
        >>> numbers([1, 2.5], "weight", at_least=0)
        tensor([1.0000, 2.5000], dtype=torch.float64)
        >>> numbers("inv_freq", "weight", at_least=0)
        Traceback (most recent call last):
        ValueError: weight must be a list of finite numbers of at least 0, one per class, got 'inv_freq'
    """
    bounds = _Bounds(above, at_least, below, at_most)
    tensor = None if isinstance(value, (bool, str)) else _tensor(value)
    dimensions = (0, 1) if or_one else (1,)
    if tensor is None or tensor.ndim not in dimensions or not bool((tensor.isfinite() & bounds.contains(tensor)).all()):
        one, several = bounds.describe("a finite number"), bounds.describe("a list of finite numbers")
        kinds = f"{one}, or a list of them" if or_one else several
        raise ValueError(f"{name} must be {kinds}, one per class, got {shown(value)}")
    return tensor


def choice(value: Any, name: str, choices: Sequence[str]) -> str:
    """Return an option if its value is one of ``choices``. Otherwise, raise a ValueError that lists the choices.

    Example:
        >>> choice("sum", "combine", ("mean", "likelihood"))
        Traceback (most recent call last):
        ValueError: combine must be one of 'mean', 'likelihood', got 'sum'
    """
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {shown(value)}")
    return value


class _Bounds(NamedTuple):
    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None

    def contains(self, value: Any) -> Any:
        held = value == value
        held = held if self.above is None else held & (value > self.above)
        held = held if self.at_least is None else held & (value >= self.at_least)
        held = held if self.below is None else held & (value < self.below)
        return held if self.at_most is None else held & (value <= self.at_most)

    def describe(self, what: str) -> str:
        if self.at_least is not None and self.at_most is not None:
            return f"{what} from {self.at_least:g} to {self.at_most:g}"
        ends = (
            ("above", self.above), ("of at least", self.at_least), ("below", self.below), ("at most", self.at_most),
        )  # fmt: skip
        return f"{what} {' and '.join(f'{word} {end:g}' for word, end in ends if end is not None)}".rstrip()


def _is_finite(value: Real) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False


def _tensor(value: Any) -> Tensor | None:
    if isinstance(value, Sequence) and any(isinstance(one, (bool, str)) for one in value):
        return None
    try:
        return torch.as_tensor(value, dtype=torch.float64).detach().clone()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def shown(value: Any) -> str:
    """Return a value as text for an error message. A long list is shortened. For a large tensor, return the shape."""
    if isinstance(value, Tensor):
        return str(value.tolist() if value.numel() <= 10 else list(value.shape))
    return reprlib.repr(value) if isinstance(value, (list, tuple)) else repr(value)
