"""The allowed values of the options of a loss, which the signature of the loss states."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

from topk_registry.registry.signatures import named_parameters, parameters, unbound

_INTERVAL = re.compile(r"([\[(])(-inf|[\d.e-]+), *([\d.e-]+|inf|n)([\])])")


@dataclass(frozen=True)
class Interval:
    """An interval of numbers from ``low`` to ``high``.

    ``closed`` has two booleans: whether the interval includes ``low``, and whether the interval includes ``high``.
    ``text`` is the notation. In ``"[1, n)"``, n is the unknown number of classes, so ``high`` is infinite.

    Example:
        >>> tau = Interval.parse("(0, inf)")
        >>> 0.1 in tau, 0 in tau, str(tau)
        (True, False, '(0, inf)')
    """

    text: str
    low: float
    high: float
    closed: tuple[bool, bool]

    @classmethod
    def parse(cls, text: str) -> "Interval":
        """Return the interval for a text such as ``"(0, 1]"`` or ``"[1, n)"``, where n is the number of classes."""
        match = _INTERVAL.fullmatch(text)
        ends = (float(match[2]), math.inf if match[3] == "n" else float(match[3])) if match else (0.0, 0.0)
        if match is None or not ends[0] < ends[1]:
            raise ValueError(f"expected an interval such as '(0, 1]', '[0, inf)' or '[1, n)', got {text!r}")
        return cls(text, *ends, (match[1] == "[", match[4] == "]"))

    def bounds(self) -> dict[str, float]:
        """Return the finite ends as keyword arguments of :func:`topk_registry.checks.number`.

        For ``"(0, 1]"``, the result is ``{"above": 0.0, "at_most": 1.0}``.
        """
        low, high = ("at_least" if self.closed[0] else "above"), ("at_most" if self.closed[1] else "below")
        return {name: end for name, end in ((low, self.low), (high, self.high)) if math.isfinite(end)}

    def __contains__(self, value: Any) -> bool:
        inside = self.low < value < self.high
        return inside or (value == self.low and self.closed[0]) or (value == self.high and self.closed[1])

    def examples(self, num_classes: int) -> tuple[list[float], list[float]]:
        """Return numbers inside and outside of the interval, with which a test can check an option.

        For ``"[1, n)"`` and ``num_classes`` n = 10, the result is ``([1], [0, 10])``. An infinite end gives no number.
        """
        high = num_classes if self.text.rstrip("]) ").endswith("n") else self.high
        ends = [end for end in zip((self.low, high), self.closed, (-1, 1), strict=True) if math.isfinite(end[0])]
        ends = [(int(end) if end == int(end) else end, closed, step) for end, closed, step in ends]
        return [end for end, closed, _ in ends if closed], [end + closed * step for end, closed, step in ends]

    def __str__(self) -> str:
        return self.text


Range = Interval | tuple[Any, ...]


def option_ranges(builder: Callable[..., Any]) -> dict[str, Range]:
    """Return the allowed values of each option: an :class:`Interval` of numbers or a tuple of choices.

    ``builder`` is the class or function that creates a loss. Its signature states the values, for example
    ``tau: Annotated[float, "(0, inf)"]`` or ``mode: Literal["a", "b"]``. If the constructor of a class states no values
    for one of its options, the values of the nearest base class apply.
    """
    taken = parameters(builder)[0]
    stated = {name: allowed for name, (_, allowed) in stated_options(unbound(builder)).items() if name in taken}
    return {name: allowed for name, allowed in stated.items() if allowed is not None}


def stated_options(factory: Callable[..., Any]) -> dict[str, tuple[Any, Range | None]]:
    """Return the annotation and the allowed values of each parameter, or None if every value is allowed.

    For a class, these are the parameters of its constructor and of the constructors of its base classes. The annotation
    is from the class that is nearest to ``factory``. If this annotation states no values, those of the next base class
    apply.
    """
    bases = factory.__mro__ if isinstance(factory, type) else ()
    constructors = [vars(base)["__init__"] for base in reversed(bases) if "__init__" in vars(base)]
    stated: dict[str, tuple[Any, Range | None]] = {}
    for function in constructors or [factory]:
        for name, parameter in named_parameters(function)[0].items():
            allowed = allowed_values(parameter.annotation)
            if allowed is None and name in stated:
                allowed = stated[name][1]
            stated[name] = (parameter.annotation, allowed)
    return stated


def allowed_values(annotation: Any) -> Range | None:
    """Return the values that the annotation of a parameter allows, or None if the annotation does not restrict them.

    Example:
        >>> str(allowed_values(Annotated[float, "(0, inf)"])), allowed_values(Literal["a", "b"]), allowed_values(float)
        ('(0, inf)', ('a', 'b'), None)
    """
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    for text in get_args(annotation)[1:] if get_origin(annotation) is Annotated else ():
        if isinstance(text, str):
            return Interval.parse(text)
    return None
