"""Errors to catch. ``topk_registry.train`` has the errors of training."""

from topk_registry.data.agreement import WrongLabelsError
from topk_registry.data.folders import FolderError
from topk_registry.data.selection import UnreadableImageError
from topk_registry.registry.errors import (
    AmbiguousPluginError,
    BrokenPluginError,
    DisabledPluginError,
    NameTakenError,
    PluginError,
    UnknownPluginError,
)

__all__ = [
    "AmbiguousPluginError",
    "BrokenPluginError",
    "DisabledPluginError",
    "FolderError",
    "NameTakenError",
    "PluginError",
    "UnknownPluginError",
    "UnreadableImageError",
    "WrongLabelsError",
]
