"""Functions that return the value of a loss's option, or raise a ValueError that names the option if it is invalid."""

from topk_registry.ops.values import choice, integer, number, numbers

__all__ = ["choice", "integer", "number", "numbers"]
