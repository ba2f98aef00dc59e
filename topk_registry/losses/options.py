"""Options of a loss as attributes: kept in double precision, and set afterwards as the constructor takes them."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from topk_registry.ops.constant import fixed_number
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
        allowed = _options(type(self))[name]
        if name in self._buffers and value is not None:
            like = self._buffers[name]
            like = next(self.buffers(), None) if like is None else like
            value = numbers(value, name) if like is None else numbers(value, name).to(like)
        elif isinstance(value, Tensor) and value.ndim == 0:
            value = value.item()
        if allowed is not None:
            check_range(name, value, allowed)
        return value


def numbers(value: Any, name: str) -> Tensor:
    """Return one number, or one a class, as a tensor of its own in double precision."""
    tensor = torch.as_tensor(value, dtype=torch.float64).detach().clone()
    if tensor.ndim > 1:
        raise ValueError(f"{name} must be one number, or one a class, got {list(tensor.shape)}")
    return tensor


def check_range(name: str, value: Any, allowed: Range) -> None:
    """Raise unless a value, or every number of a tensor, is in a range or among choices."""
    if not isinstance(allowed, Interval):
        if value not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
        return
    values = value.tolist() if isinstance(value, Tensor) else value
    for one in values if isinstance(values, list) else [values]:
        if one is None or isinstance(one, str) or one not in allowed:
            raise ValueError(f"{name} must be in {allowed}, got {one!r}")


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
def _options(cls: type) -> Mapping[str, Range | None]:
    """The options that a class's constructor names, and the range of each, None where it declares none."""
    ranges = option_ranges(cls)
    return {name: ranges.get(name) for name in list(inspect.signature(cls).parameters)}
