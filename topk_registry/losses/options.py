"""Options of a loss as attributes that are stored in double precision and checked at every assignment."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, get_args

import torch
from torch import Tensor, nn

from topk_registry.ops.values import integer, number, numbers
from topk_registry.registry.options import parameters
from topk_registry.registry.ranges import Interval, Range, option_ranges


class KeepsNumbers(nn.Module):
    """A module whose double-precision buffers keep their dtype, because they store options that the user set.

    ``.half()``, ``.float()`` and ``.to(dtype)`` convert all other buffers and the parameters.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "KeepsNumbers":
        kept = {id(b) for b in self._buffers.values() if b is not None and b.dtype == torch.float64}

        def moved(t: Tensor) -> Tensor:
            if id(t) not in kept:
                return fn(t)
            try:
                converted = fn(t)
            except TypeError:  # a device without double precision, such as MPS
                return fn(t.float())
            return converted if converted.dtype == t.dtype else t.to(converted.device)

        return super()._apply(moved, recurse)


class Adjustable(KeepsNumbers):
    """A module whose options can be changed after construction. Each new value is checked.

    An option is a parameter of the constructor. ``option_ranges`` declares the allowed range of each option.
    """

    option_ranges: ClassVar[Mapping[str, Any]] = {}
    fixed_options: ClassVar[tuple[str, ...]] = ()  # options that cannot change after construction; set via vars()

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or "_parameters" not in vars(self) or name not in options_of(type(self)):
            super().__setattr__(name, value)
        else:
            self.set_option(name, value)

    def set_option(self, name: str, value: Any) -> None:
        """Set an option. A subclass overrides this method to update values that depend on the option."""
        if name in self.fixed_options:
            raise AttributeError(
                f"{name} of {type(self).__name__} cannot be changed after construction. Build a new one with "
                f"{name}={value!r}"
            )
        super().__setattr__(name, self.checked_option(name, value))

    def checked_option(self, name: str, value: Any) -> Any:
        """Return the value of an option as the module stores it. Raise if the value is outside of ``option_ranges``."""
        option = options_of(type(self))[name]
        if isinstance(value, Tensor) and value.ndim == 0 and name not in self._buffers:
            value = value.item()
        if name in self._buffers and value is not None:
            like = self._buffers[name]
            like = next(self.buffers(), None) if like is None else like
            tensor = numbers(value, name, or_one=True, **option.bounds())
            return tensor if like is None else tensor.to(like)
        return option.checked(name, value)


class Option(NamedTuple):
    """Type and range of an option."""

    annotation: Any
    allowed: Range | None

    def bounds(self) -> dict[str, float]:
        """Return the ends of the range as keyword arguments of :func:`number`."""
        return self.allowed.bounds() if isinstance(self.allowed, Interval) else {}

    def least(self) -> int | None:
        """Return the smallest integer in the range, or None if the range has no lower end."""
        bounds = self.bounds()
        if "above" in bounds:
            return math.floor(bounds["above"]) + 1
        return math.ceil(bounds["at_least"]) if "at_least" in bounds else None

    def checked(self, name: str, value: Any) -> Any:
        """Return the value, or raise if its type is wrong or any of its numbers is out of range."""
        kinds = set(get_args(self.annotation)) or {self.annotation}
        if value is None and type(None) in kinds:
            return value
        kinds -= {type(None)}
        if kinds <= {float, "float"}:
            return number(value, name, **self.bounds())
        if kinds <= {int, "int"}:
            return integer(value, name, at_least=self.least())
        if isinstance(self.allowed, Interval) and isinstance(value, (Tensor, list, tuple)):
            numbers(value, name, or_one=True, **self.bounds())
        elif isinstance(self.allowed, Interval):
            number(value, name, **self.bounds())
        elif self.allowed is not None and value not in self.allowed:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, self.allowed))}, got {value!r}")
        return value


def index(ignore_index: Any) -> int:
    """Return ``ignore_index`` as an integer. Raise unless it fits into 64 bits."""
    return integer(ignore_index, "ignore_index", at_most=2**63 - 1)


@functools.lru_cache(maxsize=256)
def options_of(cls: type) -> Mapping[str, Option]:
    """Return the options of a class: the parameters of its constructor and, through ``**common``, of its bases."""
    ranges = option_ranges(cls)
    return {name: Option(p.annotation, ranges.get(name)) for name, p in parameters(cls)[0].items()}
