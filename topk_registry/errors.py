"""Exceptions of plug-ins and data sets. The exceptions of training are in ``topk_registry.train``."""

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
