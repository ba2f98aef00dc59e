"""Losses, data sets and model files by name, and their factories. This package imports the standard library only.

A plug-in is an entry point that an installed distribution declares in its ``pyproject.toml``:

    [project.entry-points."topk_registry.losses"]
    their_loss = "their_package.their_module:TheirLoss"

The factory is a class or a function that takes keyword options and returns a callable ``(logits, target) -> Tensor``.
Listing losses reads metadata and source files, without an import. Creating a loss imports its module. If several owners
declare a name, a loss that this process registered with ``register_loss`` has priority, then the losses of this
project. If two other distributions declare the same name, this name raises an error, and ``distribution:name`` selects
one. The names of timm losses are reserved.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from topk_registry.registry import timm_losses
from topk_registry.registry.errors import BrokenPluginError
from topk_registry.registry.options import unbound
from topk_registry.registry.registry import B, Builder, LossInfo, Registry

if TYPE_CHECKING:
    from torch import nn

__all__ = ["LossInfo", "Registry"]

losses: Registry = Registry("topk_registry.losses", "loss", reserved=timm_losses.reserved())
datasets: Registry = Registry("topk_registry.datasets", "dataset")
model_files: Registry = Registry("topk_registry.model_files", "model file")


def list_losses(filter: str | Sequence[str] = "", *, exclude: str | Sequence[str] = "") -> list[str]:
    """Return the sorted names of the registered losses, without importing a plug-in.

    Args:
        filter: one or more wildcards, as in ``timm.list_models``. ``"topk"`` matches only this name, ``"*topk*"`` every
            name that contains topk, and ``"distribution:*"`` all losses of one distribution.
        exclude: one or more wildcards of names to exclude.

    Example:
        >>> list_losses("topk_hinge*", exclude="*_convex")
        ['topk_hinge', 'topk_hinge_calibrated']
    """
    return losses.names(filter, exclude=exclude)


def is_loss(name: str) -> bool:
    """Return whether a loss of this name (or ``distribution:name``) is registered and enabled."""
    return name in losses


def loss_info(name: str) -> LossInfo:
    """Return owner, version, status, error and one-line summary of a loss without importing it."""
    return losses.info(name)


def takes_k_hot(name: str) -> bool:
    """Return whether a loss takes k-hot targets [B, n]. The factory declares this by ``takes_k_hot = True``.

    Example:
        >>> takes_k_hot("ksubset_nll"), takes_k_hot("focal")
        (True, False)
    """
    if losses.info(name).distribution == "timm":
        return name.rpartition(":")[2] in timm_losses.TAKE_K_HOT
    return getattr(unbound(losses.builder(name)), "takes_k_hot", False) is True


def get_loss_builder(name: str) -> Builder:
    """Return the factory of a loss. This imports the plug-in of the loss."""
    return losses.builder(name)


def create_loss(name: str, **options: Any) -> "nn.Module":
    """Create a loss, a callable ``(logits, target) -> Tensor``, by ``name`` or ``distribution:name``.

    Raises:
        TypeError: an option is unknown. The message lists the options.

    Example:
        >>> loss = create_loss("topk_hinge", k=3)
    """
    loss = losses.create(name, **options)
    if not callable(loss) or isinstance(loss, type):
        raise BrokenPluginError(f"loss {name!r} returned {loss!r}, expected a callable (logits, target)")
    return loss  # pyright: ignore[reportReturnType]  # it may be a plain function


def register_loss(name: str, override: bool = False) -> Callable[[B], B]:
    """Return a decorator that registers a loss factory in this process, as in a notebook or a script.

    Args:
        name: name of the loss. Without ``override``, an existing name raises an error. The names of timm losses
            are reserved.
        override: replace an existing loss of this name in this process. ``distribution:name`` still selects the old
            loss.

    Example:
        >>> @register_loss("my_loss")
        ... def my_loss(scale: float = 1.0):
        ...     return lambda logits, target: scale * logits.logsumexp(-1).mean()
    """
    return losses.register(name, override=override)


def refresh_plugins() -> None:
    """Search for plug-ins again, for example after an installation or a repair while the process runs."""
    for names in (losses, datasets, model_files):
        names.refresh()
