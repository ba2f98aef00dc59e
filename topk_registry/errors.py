"""Errors that callers may want to catch, of the registry, of training and of folders of images."""

from topk_registry.executors.errors import WorkerDiedError
from topk_registry.folders.errors import FolderError, WrongLabelsError
from topk_registry.registry.errors import (
    AmbiguousPluginError,
    BrokenPluginError,
    DisabledPluginError,
    MissingPackageError,
    NameTakenError,
    PluginError,
    UnknownPluginError,
)
from topk_registry.train.errors import (
    ConfigError,
    DataError,
    Interrupted,
    NonFiniteLossError,
    SaveError,
    TrainError,
)

__all__ = [
    "AmbiguousPluginError",
    "BrokenPluginError",
    "ConfigError",
    "DataError",
    "DisabledPluginError",
    "FolderError",
    "Interrupted",
    "MissingPackageError",
    "NameTakenError",
    "NonFiniteLossError",
    "PluginError",
    "SaveError",
    "TrainError",
    "UnknownPluginError",
    "WorkerDiedError",
    "WrongLabelsError",
]
