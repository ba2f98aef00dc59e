"""The allowed values of the options of a loss. The class or function that creates the loss declares these values."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from topk_registry.registry.options import accepts, unbound

_INTERVAL = re.compile(r"([\[(])\s*([^,\s]+)\s*,\s*([^,\s]+)\s*([\])])")


@dataclass(frozen=True)
class Interval:
    """An interval of numbers from ``low`` to ``high``.

    ``closed`` has two booleans: whether the interval includes ``low``, and whether the interval includes ``high``.
    ``text`` is the notation of the interval. If ``text`` ends in "n)" or "n]", ``high`` is infinite.

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
        match = _INTERVAL.fullmatch(text.strip())
        try:
            opening, low, high, closing = match.groups() if match else ("", "", "", "")
            ends = float(low), math.inf if high == "n" else float(high)
        except ValueError:
            raise ValueError(f"expected an interval such as '(0, 1]', '[0, inf)' or '[1, n)', got {text!r}") from None
        if not ends[0] < ends[1]:
            raise ValueError(f"the lower end of an interval must be below the upper end, got {text!r}")
        return cls(text, *ends, (opening == "[", closing == "]"))

    def bounds(self) -> dict[str, float]:
        """Return the finite ends as keyword arguments of :func:`topk_registry.options.number`.

        For ``"(0, 1]"``, the result is ``{"above": 0.0, "at_most": 1.0}``.
        """
        low, high = ("at_least" if self.closed[0] else "above"), ("at_most" if self.closed[1] else "below")
        return {name: end for name, end in ((low, self.low), (high, self.high)) if math.isfinite(end)}

    def __contains__(self, value: Any) -> bool:
        inside = self.low < value < self.high
        return inside or (value == self.low and self.closed[0]) or (value == self.high and self.closed[1])

    def inside(self, num_classes: int) -> list[float]:
        """Return the finite ends that the interval includes. ``num_classes`` is the number n in ``"[1, n)"``."""
        return [end for end, closed, _ in self._ends(num_classes) if closed]

    def outside(self, num_classes: int) -> list[float]:
        """For each finite end, return a number outside of the interval: the end if excluded, else 1 beyond the end."""
        return [end + step if closed else end for end, closed, step in self._ends(num_classes)]

    def _ends(self, num_classes: int) -> list[tuple[float, bool, int]]:
        """Return (end, whether the interval includes the end, step to the outside) for each finite end."""
        high = num_classes if self.text.rstrip("]) ").endswith("n") else self.high
        ends = ((self.low, self.closed[0], -1), (high, self.closed[1], 1))
        return [(int(e) if e == int(e) else e, closed, step) for e, closed, step in ends if math.isfinite(e)]

    def __str__(self) -> str:
        return self.text


Range = Interval | tuple[Any, ...]


def option_ranges(builder: Callable[..., Any]) -> dict[str, Range]:
    """Return the allowed values of each option: an :class:`Interval` of numbers or a tuple of choices.

    ``builder`` is the class or function that creates a loss. ``builder`` and its base classes declare the values in the
    attribute ``option_ranges``, for example ``{"tau": "(0, inf)", "mode": ("a", "b")}``.
    """
    factory = unbound(builder)
    ranges: dict[str, Range] = {}
    for owner in reversed(factory.__mro__ if isinstance(factory, type) else (factory,)):
        for option, values in getattr(owner, "__dict__", {}).get("option_ranges", {}).items():
            if owner is factory or accepts(builder, option):
                ranges[option] = Interval.parse(values) if isinstance(values, str) else tuple(values)
    return ranges
