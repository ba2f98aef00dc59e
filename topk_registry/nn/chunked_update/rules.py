"""The steps of torch's optimizers on a chunk of rows, by torch's own functions."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

REFUSED = ("amsgrad", "maximize", "differentiable")


class Rule(NamedTuple):
    """An optimizer's step.

    ``step(rows, gradient, states, group, count)`` changes the rows and their states, all of one dtype, with the
    settings of a parameter group; ``count`` is the number of this update, from 1.
    """

    states: Callable[[dict[str, Any]], tuple[str, ...]]  # names of the states in a group
    step: Callable[[Tensor, Tensor, list[Tensor], dict[str, Any], int], None]
    counts: bool = False  # whether torch's own state has the number of updates


def rule_of(optimizer: Optimizer) -> Rule:
    """Return the rule of an optimizer.

    Raises:
        TypeError: it is none of torch's SGD, Adam and AdamW.
        ValueError: it has a setting that changes the rule.
    """
    rule = RULES.get(type(optimizer))
    if rule is None:
        kind = type(optimizer)
        raise TypeError(
            f"ChunkedUpdate knows the steps of torch.optim.SGD, Adam and AdamW, got {kind.__module__}.{kind.__name__}"
        )
    for group in optimizer.param_groups:
        for name in REFUSED:
            if group.get(name):
                raise ValueError(f"ChunkedUpdate does not know {type(optimizer).__name__} with {name}=True")
    return rule


def _sgd(rows: Tensor, gradient: Tensor, states: list[Tensor], group: dict[str, Any], count: int) -> None:
    sgd(
        [rows],
        [gradient],
        list(states) if states else [None],
        foreach=False,
        fused=True,
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=float(group["lr"]),
        dampening=group["dampening"] if count > 1 else 0.0,  # the first buffer is the gradient
        nesterov=group["nesterov"],
        maximize=False,
    )


def _adam(function: Callable[..., None]) -> Callable[[Tensor, Tensor, list[Tensor], dict[str, Any], int], None]:
    def step(rows: Tensor, gradient: Tensor, states: list[Tensor], group: dict[str, Any], count: int) -> None:
        more = {"decoupled_weight_decay": True} if function is adam and group.get("decoupled_weight_decay") else {}
        function(
            [rows],
            [gradient],
            [states[0]],
            [states[1]],
            [],
            [torch.tensor(float(count - 1), device=rows.device)],  # the function counts on
            foreach=False,
            fused=True,
            amsgrad=False,
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
            **more,
        )

    return step


def _momentum(group: dict[str, Any]) -> tuple[str, ...]:
    return ("momentum_buffer",) if group["momentum"] else ()


def _moments(group: dict[str, Any]) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq")


RULES: dict[type[Optimizer], Rule] = {
    SGD: Rule(_momentum, _sgd),
    Adam: Rule(_moments, _adam(adam), counts=True),
    AdamW: Rule(_moments, _adam(adamw), counts=True),
}
