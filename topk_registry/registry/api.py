"""Losses, data sets, loggers, scores of prediction sets and columns of scored images by name.

A plug-in is an entry point that an installed distribution declares in its own ``pyproject.toml``:

    [project.entry-points."topk_registry.losses"]
    their_loss = "their_package.their_module:TheirLoss"

The factory is a class or a function that takes keyword options and returns a callable ``(logits, target) -> Tensor``.
Listing reads metadata and source files and imports nothing; asking for a loss imports its module, which runs that
plug-in's code. Findings are remembered for the life of the process; :func:`refresh_plugins` looks again.

One name, several owners: this process's own ``register_loss`` goes first, then the project's own losses. Two other
distributions that declare the same name are an error when that name is asked for, and ``distribution:name`` picks one.
timm's own names stay timm's.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from topk_registry.registry import timm_losses
from topk_registry.registry.errors import BrokenPluginError
from topk_registry.registry.registry import B, Builder, LossInfo, Registry

if TYPE_CHECKING:
    from torch import Tensor, nn

    from topk_registry.ops.targets.label_mixture import LabelMixture

    class Loss(nn.Module):
        """What editors know of a created loss; a factory that returns a plain function keeps the first line alone."""

        def __call__(self, logits: Tensor, target: Tensor | LabelMixture) -> Tensor: ...

        def __getattr__(self, name: str) -> Any: ...  # its options and methods are its own


losses: Registry = Registry("topk_registry.losses", "loss", reserved=timm_losses.reserved())
datasets: Registry = Registry("topk_registry.datasets", "dataset")
loggers: Registry = Registry("topk_registry.loggers", "logger")
model_files: Registry = Registry("topk_registry.model_files", "model file")
scores: Registry = Registry("topk_registry.scores", "score")
score_nodes: Registry = Registry("topk_registry.score_nodes", "nodes of score")
columns: Registry = Registry("topk_registry.columns", "column")


def list_losses(filter: str | Sequence[str] = "", *, exclude: str | Sequence[str] = "") -> list[str]:
    """Return the sorted names of the registered losses, without importing a plug-in.

    Args:
        filter: a wildcard or several, as in ``timm.list_models``: ``"topk"`` is that name alone, ``"*topk*"`` every
            name that contains it; ``"distribution:*"`` are the losses of one distribution.
        exclude: a wildcard or several to leave out.

    Example:
        >>> list_losses("topk_hinge*", exclude="*_convex")
        ['topk_hinge', 'topk_hinge_calibrated']
    """
    return losses.names(filter, exclude=exclude)


def is_loss(name: str) -> bool:
    """Return whether a loss of this name (or ``distribution:name``) is registered and not disabled."""
    return name in losses


def loss_info(name: str) -> LossInfo:
    """Return a loss's owner, version, status, reason if broken, and one-line summary, without importing it."""
    return losses.info(name)


def takes_k_hot(name: str) -> bool:
    """Return whether a loss takes k-hot targets [B, n], several labels an image, without importing it.

    timm's own are known. Another says so by an attribute of its class or function, ``takes_k_hot = True``.

    Example:
        >>> takes_k_hot("ksubset_nll"), takes_k_hot("focal")
        (True, False)
    """
    if losses.info(name).status == "timm":
        return name.rpartition(":")[2] in timm_losses.TAKE_K_HOT
    return losses.info(name).status not in ("broken", "ambiguous", "disabled") and losses.declares(name, "takes_k_hot")


def get_loss_builder(name: str) -> Builder:
    """Return the factory of a loss, which imports its plug-in. Errors as in :meth:`Registry.builder`."""
    return losses.builder(name)


def create_loss(name: str, **options: Any) -> "Loss":
    """Build the loss of this name with these options: a callable ``(logits, target) -> Tensor``.

    Args:
        name: a name of :func:`list_losses`, or ``distribution:name``.
        options: the factory's keyword options; one that it does not take is a TypeError that lists its options.

    Example:
        >>> loss = create_loss("topk_hinge", k=3)
    """
    return build_loss(name, get_loss_builder(name), **options)


def build_loss(name: str, factory: Builder, /, **options: Any) -> "Loss":
    """Build a loss with the factory that :func:`get_loss_builder` returned for its name."""
    loss = losses.build(name, factory, options)
    if not callable(loss):
        raise BrokenPluginError(
            f"{losses.describe(name)} built {loss!r}, which is no callable (logits, target) -> Tensor"
        )
    return loss  # pyright: ignore[reportReturnType]  # a plain function has the call, if not the rest


def register_loss(name: str, override: bool = False) -> Callable[[B], B]:
    """Register a loss factory in this process, for a notebook or a script outside any distribution.

    A name that is taken is an error unless ``override=True``, which hides the other one from this process; it stays
    available as ``distribution:name``. timm's own names cannot be overridden.

    Example:
        >>> @register_loss("my_loss")
        ... def my_loss(scale: float = 1.0):
        ...     return lambda logits, target: scale * logits.logsumexp(-1).mean()
    """
    return losses.register(name, override=override)


def refresh_plugins() -> None:
    """Look for plug-ins again, after an installation or a repair while the process runs."""
    for names in (losses, datasets, loggers, model_files, scores, score_nodes, columns):
        names.refresh()
