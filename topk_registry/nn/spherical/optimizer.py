"""SGD for a spherical layer as a torch optimizer, so that learning rate schedules drive it; no other rule is exact."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from topk_registry.nn.spherical.layer import SphericalLinear

MARK = "_of_spherical_layer"


class SphericalSGD(Optimizer):
    """Plain SGD on the dense weight of a :class:`SphericalLinear`, in O(d^2) a sample.

    Args:
        layer: the layer.
        lr: learning rate; torch's schedulers change it in ``param_groups``.
        weight_decay: L2 decay, as in ``torch.optim.SGD``.
        max_norm: clip the gradient of the dense weight to this norm.

    Example:
        >>> layer = SphericalLinear(16, 1000)
        >>> optimizer = SphericalSGD(layer, lr=0.1)
        >>> schedule = torch.optim.lr_scheduler.StepLR(optimizer, 30)
    """

    def __init__(
        self, layer: "SphericalLinear", *, lr: float, weight_decay: float = 0.0, max_norm: float | None = None
    ) -> None:
        check_step(lr, weight_decay, max_norm)
        self._layer = layer
        super().__init__([layer.factors.V], {"lr": lr, "weight_decay": weight_decay, "max_norm": max_norm})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Apply what backward passes left since the last step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        group = self.param_groups[0]
        self._layer.step(float(group["lr"]), weight_decay=group["weight_decay"], max_norm=group["max_norm"])
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop what backward passes left since the last step."""
        self._layer.zero_grad(set_to_none)


def check_step(lr: float, weight_decay: float, max_norm: float | None) -> None:
    for name, value in (("lr", lr), ("weight_decay", weight_decay)):
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name} must be finite and at least 0, got {value!r}")
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm must be positive, got {max_norm!r}")


def _refuse_others(optimizer: Optimizer, *_: Any) -> None:
    """Refuse any other optimizer that holds the weight of a spherical layer."""
    if isinstance(optimizer, SphericalSGD):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if getattr(parameter, MARK, False):
                raise TypeError(
                    f"{type(optimizer).__name__} cannot train a SphericalLinear: its gradient has no dense form, and "
                    "only plain SGD (schedule, decay, clipping) has an exact step. Give the optimizer the backbone's "
                    "parameters, and call layer.step(lr) or SphericalSGD(layer, lr=...).step() for this layer"
                )


register_optimizer_step_pre_hook(_refuse_others)
