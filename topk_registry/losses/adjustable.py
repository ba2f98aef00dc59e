"""Base classes of modules with options. An option is an attribute that is checked at every assignment."""

import functools
from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, NamedTuple, Union, get_args, get_origin

import torch
from torch import Tensor, nn

from topk_registry.checks import integer, number, numbers, shown
from topk_registry.registry.ranges import Interval, Range, stated_options
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

    Every parameter of the constructor is an option. Its annotation states the type and the allowed values, for example
    ``tau: Annotated[float, "(0, inf)"]`` or ``mode: Literal["a", "b"]``. The constructor stores the option with an
    assignment such as ``self.tau = tau``. Every assignment checks the value, also after construction.

    If the annotation has the type Tensor and an interval, the option is one number per class. It is stored as a buffer
    in double precision. If the type float is allowed too, the option may also be one number for all classes.
    """

    # these options can only be assigned once, by the constructor; a second assignment raises an AttributeError
    fixed_options: ClassVar[tuple[str, ...]] = ()
    _classes: int | None = None  # number of classes for which the options were checked
    _per_class: tuple[str, ...] = ()  # options that are one number per class

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
        if name in self.fixed_options and (name in vars(self) or name in self._buffers):
            raise AttributeError(
                f"{name} of {type(self).__name__} cannot be changed after construction. Build a new one with "
                f"{name}={value!r}"
            )
        value = self.checked_option(name, value)
        if options_of(type(self))[name].is_per_class and name not in self._buffers:
            self.register_buffer(name, None, persistent=name not in self.fixed_options)
            self._per_class = (*self._per_class, name)
        super().__setattr__(name, value)

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

    def check_lengths(self, n: int) -> None:
        """Raise a ValueError if an option with one number per class has not n numbers."""
        for name in self._per_class:
            values = self._buffers[name]
            if values is not None and values.ndim and len(values) != n:
                raise ValueError(f"{name} has {len(values)} entries, logits have {n} classes")

    def given_options(self) -> dict[str, Any]:
        """Return the options that the module stores, with values that its constructor accepts."""
        return {name: getattr(self, name) for name in parameters(type(self))[0] if hasattr(self, name)}

    def extra_repr(self) -> str:
        options = self.given_options().items()
        return ", ".join(f"{name}={shown(value)}" for name, value in options if value is not None)


class Option(NamedTuple):
    """Types and allowed values of an option."""

    types: frozenset[Any]
    allowed: Range | None  # an interval or a tuple of values; None if every value is allowed

    @classmethod
    def of(cls, annotation: Any, allowed: Range | None) -> "Option":
        plain = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
        return cls(frozenset(get_args(plain) if get_origin(plain) in (Union, UnionType) else [plain]), allowed)

    @property
    def is_per_class(self) -> bool:
        return Tensor in self.types and isinstance(self.allowed, Interval)

    def checked(self, name: str, value: Any) -> Any:
        """Convert a value to the type of the option. If the value is not allowed, raise a ValueError."""
        if value is None and NoneType in self.types:
            return value
        types = self.types - {NoneType}
        bounds: dict[str, Any] = self.allowed.bounds() if isinstance(self.allowed, Interval) else {}
        if types == {float}:
            return number(value, name, **bounds)
        if types == {int}:
            return int(number(integer(value, name, at_least=bounds.get("at_least")), name, **bounds))
        if isinstance(self.allowed, Interval):
            given = numbers(value, name, or_one=float in types or int in types, **bounds)
            return given if self.is_per_class else value
        if self.allowed is not None and value not in self.allowed:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, self.allowed))}, got {value!r}")
        return value


@functools.lru_cache(maxsize=256)
def options_of(cls: type) -> Mapping[str, Option]:
    """Return an :class:`Option` for each parameter of the constructors of a class and its base classes.

    A base class stores its options even if the constructor of the class does not take them. If an annotation states no
    allowed values, the values of the nearest base class apply.
    """
    return {name: Option.of(*stated) for name, stated in stated_options(cls).items() if name != "self"}
