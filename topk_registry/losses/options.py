"""Options of a loss as attributes: kept in double precision, and set afterwards as the constructor takes them."""

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, get_args

import torch
from torch import Tensor, nn

from topk_registry.ops.constant import fixed_number
from topk_registry.ops.values import integer, number, numbers
from topk_registry.registry.ranges import Interval, Range, option_ranges


class KeepsNumbers(nn.Module):
    """A module whose buffers in double precision stay so: they hold options, numbers that a user gave.

    ``.half()``, ``.float()`` and ``.to(dtype)`` convert all other buffers, and the parameters. A checkpoint may hold
    these buffers in any precision.
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

        with torch.inference_mode(False):  # a tensor that was made in that mode cannot be used for training
            return super()._apply(moved, recurse)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name, buffer in self._buffers.items():
            saved = state_dict.get(prefix + name)
            # older checkpoints hold options in single precision: the same numbers, rounded
            if buffer is None or buffer.dtype != torch.float64 or not isinstance(saved, Tensor):
                continue
            known = not (buffer.is_meta or saved.is_meta) and saved.dtype != buffer.dtype
            if known and torch.equal(saved, buffer.to(saved)):
                state_dict[prefix + name] = buffer
        super()._load_from_state_dict(state_dict, prefix, *args)


class Adjustable(KeepsNumbers):
    """A module whose options can be set after it is built: each is checked as then, or refused.

    An option is what the constructor's signature names. Where the module has an attribute of that name, it can be set.
    """

    option_ranges: ClassVar[Mapping[str, Any]] = {}
    fixed_options: ClassVar[tuple[str, ...]] = ()  # those that an attribute shows, and that cannot be set

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" not in vars(cls):
            return
        for name, parameter in inspect.signature(cls.__init__).parameters.items():
            if parameter.annotation in (float, "float"):
                setattr(cls, name, _number(name))
        type.__setattr__(cls, "__init__", _building(cls.__init__))  # an assignment would declare an untyped one

    def __setattr__(self, name: str, value: Any) -> None:
        if not vars(self).get("_building", True) and name in _options(type(self)):
            with torch.inference_mode(False):  # as in the constructor
                self.set_option(name, value)
        else:
            super().__setattr__(name, value)

    def set_option(self, name: str, value: Any) -> None:
        """Set an option of the built module; a subclass brings what depends on it up to date."""
        if name in self.fixed_options or not hasattr(self, name):
            raise AttributeError(
                f"{name} of {type(self).__name__} cannot be set after it is built: build another one with "
                f"{name}={value!r}"
            )
        super().__setattr__(name, self.checked_option(name, value))

    def checked_option(self, name: str, value: Any) -> Any:
        """Return the value of an option as the module keeps it; raise if it is outside of ``option_ranges``."""
        option = _options(type(self))[name]
        if isinstance(value, Tensor) and value.ndim == 0 and name not in self._buffers:
            value = value.item()
        if name in self._buffers and value is not None:
            like = self._buffers[name]
            like = next(self.buffers(), None) if like is None else like
            tensor = numbers(value, name, or_one=True, **option.bounds())
            return tensor if like is None else tensor.to(like)
        return option.checked(name, value)


class Option(NamedTuple):
    """What a constructor's signature and ``option_ranges`` say of an option."""

    annotation: Any
    allowed: Range | None

    def bounds(self) -> dict[str, float]:
        """The ends of its range, as :func:`number` takes them."""
        return self.allowed.bounds() if isinstance(self.allowed, Interval) else {}

    def least(self) -> int | None:
        """The least integer in its range; None where there is none."""
        bounds = self.bounds()
        if "above" in bounds:
            return math.floor(bounds["above"]) + 1
        return math.ceil(bounds["at_least"]) if "at_least" in bounds else None

    def checked(self, name: str, value: Any) -> Any:
        """Return a value; raise unless it is of the option's type, and it, or every number of it, is in its range."""
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
    """Return an ``ignore_index``, which is any integer of 64 bits."""
    return integer(ignore_index, "ignore_index", at_most=2**63 - 1)


def _number(name: str) -> property:
    """An attribute that holds a float, and is a constant of compiled graphs: see :func:`fixed_number`."""
    place = f"_{name}"

    def get(self: Adjustable) -> float:
        number = getattr(self, place)
        return fixed_number(number) if torch.compiler.is_compiling() else number

    def put(self: Adjustable, value: float) -> None:
        vars(self)[place] = value

    return property(get, put)


def _building(init: Callable[..., None]) -> Callable[..., None]:
    """The constructor of a class; while that of the module runs, options are set without checks."""

    @functools.wraps(init)
    def build(self: Adjustable, *args: Any, **kwargs: Any) -> None:
        outermost = "_building" not in vars(self)  # else a base class's constructor, called by the module's own
        vars(self)["_building"] = True
        with torch.inference_mode(False):  # its buffers are used for training
            init(self, *args, **kwargs)
        vars(self)["_building"] = not outermost

    return build


@functools.lru_cache(maxsize=256)
def _options(cls: type) -> Mapping[str, Option]:
    """The options that a class's constructor names."""
    ranges = option_ranges(cls)
    return {name: Option(p.annotation, ranges.get(name)) for name, p in inspect.signature(cls).parameters.items()}
