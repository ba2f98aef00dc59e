"""Names of losses, data sets and other plug-ins, and the factories behind them. Imports the standard library only."""

from topk_registry.registry.api import (
    build_loss,
    create_loss,
    datasets,
    get_loss_builder,
    is_loss,
    list_losses,
    loss_info,
    losses,
    model_files,
    refresh_plugins,
    register_loss,
    takes_k_hot,
)
from topk_registry.registry.registry import LossInfo, Registry

__all__ = [
    "LossInfo",
    "Registry",
    "build_loss",
    "create_loss",
    "datasets",
    "get_loss_builder",
    "is_loss",
    "list_losses",
    "loss_info",
    "losses",
    "model_files",
    "refresh_plugins",
    "register_loss",
    "takes_k_hot",
]
