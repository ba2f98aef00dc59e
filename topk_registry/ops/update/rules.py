"""The steps of torch's optimizers on a chunk of rows, by torch's own functions."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

REFUSED = ("amsgrad", "maximize", "differentiable")


class Numbers(NamedTuple):
    """Numbers of one step, see README.md; moments are used by Adam and AdamW, momentum by SGD."""

    is_adam: bool
    size: float  # of the step: the learning rate, of Adam over the correction of the first moment
    keep: float  # what decoupled decay leaves of the weight
    decay: float  # times the weight is added to the gradient
    first: float  # times the gradient goes into the first state
    rest: float  # times the first state stays
    second: float = 0.0  # times the gradient's square goes into the second state
    second_rest: float = 0.0  # times the second state stays
    root: float = 1.0  # of the correction of the second moment
    eps: float = 0.0
    nesterov: bool = False


class Rule(NamedTuple):
    """An optimizer's step.

    ``step(rows, gradient, states, group, count)`` changes the rows and their states, all of one dtype, with the
    settings of a parameter group; ``count`` is the number of this update, from 1. ``numbers(group, count)`` are those
    that a compiled kernel needs, see :class:`Numbers`.
    """

    states: Callable[[dict[str, Any]], tuple[str, ...]]  # names of the states in a group
    step: Callable[[Tensor, Tensor, list[Tensor], dict[str, Any], int], None]
    numbers: Callable[[dict[str, Any], int], Numbers]
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


def _numbers_of_sgd(group: dict[str, Any], count: int) -> Numbers:
    return Numbers(
        is_adam=False,
        size=float(group["lr"]),
        keep=1.0,
        decay=float(group["weight_decay"]),
        first=1.0 - (group["dampening"] if count > 1 else 0.0),
        rest=float(group["momentum"]),
        nesterov=bool(group["nesterov"]),
    )


def _numbers_of_adam(decouples: bool, group: dict[str, Any], count: int) -> Numbers:
    decoupled = decouples or bool(group.get("decoupled_weight_decay"))
    first, second = (float(beta) for beta in group["betas"])
    rate, decay = float(group["lr"]), float(group["weight_decay"])
    return Numbers(
        is_adam=True,
        size=rate / (1 - first**count),
        keep=1 - rate * decay if decoupled else 1.0,
        decay=0.0 if decoupled else decay,
        first=1 - first,
        rest=first,
        second=1 - second,
        second_rest=second,
        root=math.sqrt(1 - second**count),
        eps=float(group["eps"]),
    )


def _momentum(group: dict[str, Any]) -> tuple[str, ...]:
    return ("momentum_buffer",) if group["momentum"] else ()


def _moments(group: dict[str, Any]) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq")


RULES: dict[type[Optimizer], Rule] = {
    SGD: Rule(_momentum, _sgd, _numbers_of_sgd),
    Adam: Rule(_moments, _adam(adam), partial(_numbers_of_adam, False), counts=True),
    AdamW: Rule(_moments, _adam(adamw), partial(_numbers_of_adam, True), counts=True),
}
