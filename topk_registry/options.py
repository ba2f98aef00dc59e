"""Functions that check an option of a loss, and return its value or raise a ValueError that names the option."""

from topk_registry.ops.values import choice, integer, number, numbers

__all__ = ["choice", "integer", "number", "numbers"]
