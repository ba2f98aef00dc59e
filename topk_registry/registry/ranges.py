"""Allowed ranges of a factory's options, as the factory declares them."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from topk_registry.registry.options import accepts, unbound

CLASSES = "n"  # upper end that stands for the number of classes
_INTERVAL = re.compile(r"([\[(])\s*([^,\s]+)\s*,\s*([^,\s]+)\s*([\])])")


@dataclass(frozen=True)
class Interval:
    """An interval of numbers. ``closed`` tells for each end whether it belongs to the interval.

    Example:
        >>> tau = Interval.parse("(0, inf)")
        >>> 0.1 in tau, 0 in tau, str(tau)
        (True, False, '(0, inf)')
    """

    low: float
    high: float | str
    closed: tuple[bool, bool]

    @classmethod
    def parse(cls, text: str) -> "Interval":
        """Parse an interval such as ``"(0, 1]"``, ``"[0, inf)"`` or ``"[1, n)"``, where n is the number of classes."""
        match = _INTERVAL.fullmatch(text.strip())
        try:
            opening, low, high, closing = match.groups() if match else ("", "", "", "")
            interval = cls(float(low), high if high == CLASSES else float(high), (opening == "[", closing == "]"))
        except ValueError:
            raise ValueError(f"expected an interval such as '(0, 1]', '[0, inf)' or '[1, n)', got {text!r}") from None
        if not interval.low < interval.end(math.inf):
            raise ValueError(f"the lower end of an interval must be below the upper end, got {text!r}")
        return interval

    def end(self, num_classes: float) -> float:
        """Return the upper end as a number, for this number of classes."""
        return num_classes if isinstance(self.high, str) else self.high

    def bounds(self) -> dict[str, float]:
        """Return the finite ends as keyword arguments of :func:`topk_registry.options.number`."""
        low, high = ("at_least" if self.closed[0] else "above"), ("at_most" if self.closed[1] else "below")
        return {name: end for name, end in ((low, self.low), (high, self.end(math.inf))) if math.isfinite(end)}

    def in_words(self) -> str:
        """Describe the interval in words: "from 0 to 1", "above 0", "finite"."""
        ends = self.bounds()
        if {*ends} == {"at_least", "at_most"}:
            return f"from {ends['at_least']:g} to {ends['at_most']:g}"
        return " and ".join(f"{word.replace('_', ' ')} {end:g}" for word, end in ends.items()) or "finite"

    def __contains__(self, value: Any) -> bool:
        high = self.end(math.inf)
        return (self.low < value < high) or (value == self.low and self.closed[0]) or (value == high and self.closed[1])

    def inside(self, num_classes: int) -> list[float]:
        """Return the ends that belong to the interval."""
        ends = zip((self.low, self.end(num_classes)), self.closed, strict=True)
        return [_whole(end) for end, closed in ends if closed]

    def outside(self, num_classes: int) -> list[float]:
        """Return a value beyond each finite end. If an end does not belong to the interval, it is that end."""
        ends = ((self.low, self.closed[0], -1.0), (self.end(num_classes), self.closed[1], 1.0))
        return [_whole(end + step if closed else end) for end, closed, step in ends if math.isfinite(end)]

    def __str__(self) -> str:
        high = self.high if isinstance(self.high, str) else f"{self.high:g}"
        return f"{'[' if self.closed[0] else '('}{self.low:g}, {high}{']' if self.closed[1] else ')'}"


Range = Interval | tuple[Any, ...]


def option_ranges(builder: Callable[..., Any]) -> dict[str, Range]:
    """Return the allowed ranges of the options, from ``option_ranges`` of a factory and of its bases.

    A range is an interval as text or a tuple of choices: ``{"tau": "(0, inf)", "mode": ("a", "b")}``.
    """
    factory = unbound(builder)
    ranges: dict[str, Range] = {}
    for owner in reversed(factory.__mro__ if isinstance(factory, type) else (factory,)):
        for option, values in getattr(owner, "__dict__", {}).get("option_ranges", {}).items():
            if owner is factory or accepts(builder, option):
                ranges[option] = Interval.parse(values) if isinstance(values, str) else tuple(values)
    return ranges


def _whole(value: float) -> float:
    """Return an integral value as int, which options such as k require."""
    return int(value) if value == int(value) else value
