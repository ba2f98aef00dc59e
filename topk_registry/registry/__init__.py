"""Names of losses and data sets, and the factories behind them. Imports the standard library only."""

from topk_registry.registry.api import (
    LossInfo,
    Registry,
    create_loss,
    datasets,
    get_loss_builder,
    is_loss,
    list_losses,
    loss_info,
    losses,
    refresh_plugins,
    register_loss,
)

__all__ = [
    "LossInfo",
    "Registry",
    "create_loss",
    "datasets",
    "get_loss_builder",
    "is_loss",
    "list_losses",
    "loss_info",
    "losses",
    "refresh_plugins",
    "register_loss",
]
