"""The registries, which find losses, data sets and kinds of model files by name.

This package imports the standard library only.

A plug-in is an entry point. An installed distribution declares the entry point of a loss in its ``pyproject.toml``:

    [project.entry-points."topk_registry.losses"]
    their_loss = "their_package.their_module:TheirLoss"

``TheirLoss`` is called the factory of the loss. The factory is a class or a function that takes keyword options and
returns a callable ``(logits, target) -> Tensor``. The list of losses comes from metadata and source files, so listing
imports no plug-in. Creating a loss imports the module of the factory.

If several plug-ins have the same name, the priority is as follows. A loss that this process registered with
``register_loss`` comes first, and the losses of this project come second. If the plug-ins come from two other
distributions, every use of the name raises an error, and ``distribution:name`` selects one of the plug-ins. Plug-ins
cannot have the name of a timm loss.
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
    """Return the names of the registered losses in alphabetical order, without importing a plug-in.

    Args:
        filter: one or more patterns with wildcards, as in ``timm.list_models``. Only names that match a pattern are
            returned. ``"topk"`` matches only the name topk, ``"*topk*"`` matches every name that contains topk, and
            ``"distribution:*"`` matches all losses of one distribution. Default: all names.
        exclude: one or more patterns. Names that match a pattern are not returned.

    Example:
        >>> list_losses("topk_hinge*", exclude="*_convex")
        ['topk_hinge', 'topk_hinge_calibrated']
    """
    return losses.names(filter, exclude=exclude)


def is_loss(name: str) -> bool:
    """Return whether a loss with this name, or ``distribution:name``, is registered and not disabled."""
    return name in losses


def loss_info(name: str) -> LossInfo:
    """Return facts about a loss, such as its distribution and its version, without importing the loss.

    If the name is unknown, ambiguous or disabled, the function raises a ``PluginError``.
    """
    return losses.info(name)


def takes_k_hot(name: str) -> bool:
    """Return whether a loss accepts k-hot targets [B, n], with 1 for each label of a sample and 0 elsewhere.

    The class or function that creates such a loss has the attribute ``takes_k_hot = True``. This function imports the
    loss.

    Example:
        >>> takes_k_hot("ksubset_nll"), takes_k_hot("focal")
        (True, False)
    """
    if losses.info(name).distribution == "timm":
        return name.rpartition(":")[2] in timm_losses.TAKE_K_HOT
    return getattr(unbound(losses.builder(name)), "takes_k_hot", False) is True


def get_loss_builder(name: str) -> Builder:
    """Import the plug-in of a loss, and return the class or function that creates the loss."""
    return losses.builder(name)


def create_loss(name: str, **options: Any) -> "nn.Module":
    """Create a loss. The result is a callable ``(logits, target) -> Tensor``.

    Args:
        name: name of the loss, or ``distribution:name``.
        options: options of the loss, such as ``k=3``.

    Raises:
        TypeError: the loss has no such option. The message lists the options of the loss.
        PluginError: the name is unknown, ambiguous or disabled, or the plug-in is broken.

    Example:
        >>> loss = create_loss("topk_hinge", k=3)
    """
    loss = losses.create(name, **options)
    if not callable(loss) or isinstance(loss, type):
        raise BrokenPluginError(f"loss {name!r} returned {loss!r}, expected a callable (logits, target)")
    return loss  # pyright: ignore[reportReturnType]  # it may be a plain function


def register_loss(name: str, override: bool = False) -> Callable[[B], B]:
    """Return a decorator that registers a loss in this process, for example in a notebook.

    The decorated class or function takes the options of the loss and returns the loss.

    Args:
        name: name of the loss. The name of a timm loss raises an error.
        override: If a loss with this name exists and ``override`` is False, the decorator raises an error. If True, the
            new loss replaces the old loss in this process. ``distribution:name`` still selects the old loss.

    Example:
        >>> @register_loss("my_loss")
        ... def my_loss(scale: float = 1.0):
        ...     return lambda logits, target: scale * logits.logsumexp(-1).mean()
    """
    return losses.register(name, override=override)


def refresh_plugins() -> None:
    """Search for plug-ins again. Call this function after you install or repair a plug-in while the process runs."""
    for names in (losses, datasets, model_files):
        names.refresh()
