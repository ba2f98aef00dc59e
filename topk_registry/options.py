"""Checks of options, for plug-ins. Each function returns the checked value or raises an error that names the option."""

from topk_registry.ops.values import choice, integer, number, numbers

__all__ = ["choice", "integer", "number", "numbers"]
