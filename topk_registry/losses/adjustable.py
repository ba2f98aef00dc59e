"""Base classes of modules with options. An option is an attribute that is checked at every assignment."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, get_args

import torch
from torch import Tensor, nn

from topk_registry.checks import integer, number, numbers
from topk_registry.registry.ranges import Interval, Range, option_ranges
from topk_registry.registry.signatures import parameters


class KeepsNumbers(nn.Module):
    """A module whose float64 buffers keep their dtype in ``.half()``, ``.float()`` and ``.to(dtype)``.

    These buffers store options that the user has set. All parameters and all other buffers are converted.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "KeepsNumbers":
        kept = {id(b) for b in self._buffers.values() if b is not None and b.dtype == torch.float64}

        def moved(t: Tensor) -> Tensor:
            if id(t) not in kept:
                return fn(t)
            try:
                converted = fn(t)
            except TypeError:  # the device does not support float64, for example MPS
                return fn(t.float())
            return converted if converted.dtype == t.dtype else t.to(converted.device)

        return super()._apply(moved, recurse)


class Adjustable(KeepsNumbers):
    """A module with options that can be changed after construction, for example ``loss.tau = 0.3``.

    Every parameter of the constructor is an option. Each assigned value is checked against ``option_ranges``, which
    maps the name of an option to an interval such as ``"(0, inf)"`` or to a tuple of allowed values.
    """

    option_ranges: ClassVar[Mapping[str, Any]] = {}
    _classes: int | None = None  # number of classes for which the options were checked
    # assignment to these options raises an AttributeError; the constructor stores them with vars(self)[name] = value
    fixed_options: ClassVar[tuple[str, ...]] = ()

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or "_parameters" not in vars(self) or name not in options_of(type(self)):
            super().__setattr__(name, value)
        else:
            vars(self)["_classes"] = None
            self.set_option(name, value)

    def set_option(self, name: str, value: Any) -> None:
        """Check a value and store it as the option ``name``. Each assignment ``module.name = value`` calls this method.

        If other attributes depend on an option, a subclass extends this method and updates these attributes.
        """
        if name in self.fixed_options:
            raise AttributeError(
                f"{name} of {type(self).__name__} cannot be changed after construction. Build a new one with "
                f"{name}={value!r}"
            )
        super().__setattr__(name, self.checked_option(name, value))

    def checked_option(self, name: str, value: Any) -> Any:
        """Convert a value to the form in which the option is stored. Raise a ValueError if the value is not allowed."""
        if isinstance(value, Tensor) and value.ndim == 0 and name not in self._buffers:
            value = value.item()
        value = options_of(type(self))[name].checked(name, value)
        if name not in self._buffers or value is None:
            return value
        tensor = torch.as_tensor(value, dtype=torch.float64).detach().clone()
        like, kept = self._buffers[name], (b for b in self.buffers() if b.dtype == torch.float64)
        return tensor.to(next(kept, tensor) if like is None else like)


class Option(NamedTuple):
    """Type and allowed values of an option."""

    annotation: Any  # type annotation of the constructor's parameter
    allowed: Range | None  # an interval or a tuple of values; None if every value is allowed

    def checked(self, name: str, value: Any) -> Any:
        """Convert a value to the type of the option. If the value is not allowed, raise a ValueError."""
        if value is None and type(None) in get_args(self.annotation):
            return value
        kinds = (set(get_args(self.annotation)) or {self.annotation}) - {type(None)}
        bounds: dict[str, Any] = self.allowed.bounds() if isinstance(self.allowed, Interval) else {}
        if kinds <= {float, "float"}:
            return number(value, name, **bounds)
        if kinds <= {int, "int"}:
            return int(number(integer(value, name, at_least=bounds.get("at_least")), name, **bounds))
        if isinstance(self.allowed, Interval) and int in kinds and isinstance(value, int):
            number(value, name, **bounds)  # for example one k, where a list of k is allowed
        elif isinstance(self.allowed, Interval):
            numbers(value, name, or_one=True, **bounds)
        elif self.allowed is not None and value not in self.allowed:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, self.allowed))}, got {value!r}")
        return value


@functools.lru_cache(maxsize=256)
def options_of(cls: type) -> Mapping[str, Option]:
    """Return an :class:`Option` for each parameter of the constructor of a class: ``{name: Option}``.

    If the constructor has a parameter ``**common``, the options of the base classes are included.
    """
    ranges = option_ranges(cls)
    return {name: Option(p.annotation, ranges.get(name)) for name, p in parameters(cls)[0].items()}
