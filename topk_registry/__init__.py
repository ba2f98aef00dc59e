"""Top-k losses by name, and exact top-k probabilities.

Public names are resolved on first use, so that ``import topk_registry`` and listing losses cost neither torch nor any
plug-in's import.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from topk_registry.base import ClassificationLoss, TopKLoss
    from topk_registry.classifier import CosineClassifier, normalize_classifier
    from topk_registry.registry import (
        LossInfo,
        create_loss,
        get_loss_builder,
        is_loss,
        list_losses,
        loss_info,
        register_loss,
    )

_HOMES = {
    "ClassificationLoss": "base",
    "CosineClassifier": "classifier",
    "LossInfo": "registry",
    "TopKLoss": "base",
    "create_loss": "registry",
    "get_loss_builder": "registry",
    "is_loss": "registry",
    "list_losses": "registry",
    "loss_info": "registry",
    "normalize_classifier": "classifier",
    "register_loss": "registry",
}

__all__ = [
    "ClassificationLoss",
    "CosineClassifier",
    "LossInfo",
    "TopKLoss",
    "create_loss",
    "get_loss_builder",
    "is_loss",
    "list_losses",
    "loss_info",
    "normalize_classifier",
    "register_loss",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(f"topk_registry.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'topk_registry' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
