"""The registries, which find losses, data sets and readers of model files by name.

This package imports only the standard library, so listing losses does not import torch.

A plug-in is an entry point. An installed distribution declares the entry point of a loss in its ``pyproject.toml``:

    [project.entry-points."topk_registry.losses"]
    their_loss = "their_package.their_module:TheirLoss"

``TheirLoss`` is called the factory of the loss. The factory is a class or a function that takes keyword options and
returns a callable ``(logits, target) -> Tensor``. The list of losses comes from metadata and source files, so listing
imports no plug-in. Creating a loss imports the module of the factory.

If several losses have the same name, a loss that this process registered with ``register_loss`` takes priority. The
losses of this project come next, and the losses of all other distributions come last. If two other
distributions define the name, the use of the name raises an error, and ``distribution:name`` selects one of the losses.
The registry also has the losses of timm, such as ``bce``. No plug-in can take the name of a timm loss.
"""

from typing import TYPE_CHECKING, Any

from topk_registry.errors import BrokenPluginError
from topk_registry.registry import timm_losses
from topk_registry.registry.registry import LossInfo, Registry
from topk_registry.registry.signatures import unbound

if TYPE_CHECKING:
    from torch import nn

__all__ = ["LossInfo", "Registry"]

losses: Registry = Registry("topk_registry.losses", "loss", reserved=timm_losses.reserved())
datasets: Registry = Registry("topk_registry.datasets", "dataset")
model_files: Registry = Registry("topk_registry.model_files", "model file")

# the public functions for losses are methods of their registry
list_losses = losses.names
is_loss = losses.__contains__
loss_info = losses.info
get_loss_builder = losses.builder
register_loss = losses.register


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


def create_loss(name: str, **options: Any) -> "nn.Module":
    """Create a loss. The result is a callable ``(logits, target) -> Tensor``.

    Args:
        name: name of the loss, or ``distribution:name``.
        options: options of the loss, such as ``k=3``.

    Raises:
        TypeError: the loss has no such option. The message lists the options of the loss.
        PluginError: the name is unknown or ambiguous, or the plug-in is broken or disabled by an environment variable.

    Example:
        >>> loss = create_loss("topk_hinge", k=3)
    """
    loss = losses.create(name, **options)
    if not callable(loss) or isinstance(loss, type):
        raise BrokenPluginError(f"loss {name!r} returned {loss!r}, expected a callable (logits, target)")
    return loss  # pyright: ignore[reportReturnType]  # it may be a plain function


def refresh_plugins() -> None:
    """Search for plug-ins again. Call this function after you install or repair a plug-in while the process runs."""
    for names in (losses, datasets, model_files):
        names.refresh()
