"""Any registered loss, a third party's too, with what its signature asks for."""

import inspect
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from topk_registry import ClassificationLoss, registry
from topk_registry.registry.options import CONTEXT, accepted_context, accepts, tuning_grid

# flags that a loss of ours needs: cosine scores come of a classifier of their own
TRAINED_WITH = {name: {"normalize_classifier": 1.0} for name in ("ldam", "noised_topk_imbalanced")}
NOT_OWN = {*CONTEXT, "label_smoothing", "ignore_index"}
Loss = Callable[[Tensor, Tensor], Tensor]


def build(name: str, *, class_counts: Sequence[int], **wanted: Any) -> Loss:
    """The loss of this name, with its own defaults but for the options ``wanted`` that it takes.

    Args:
        name: a registered loss.
        class_counts: training samples of each class, for losses that ask for them.
        wanted: options such as ``k``; those that its factory does not name are left out.
    """
    builder = registry.get_loss_builder(name)
    context = {
        "num_classes": len(class_counts),
        "class_counts": list(class_counts),
        "smoothing": 0.0,
        "soft_targets": False,
        "total_epochs": 1,
    }
    given = {option: value for option, value in wanted.items() if accepts(builder, option)}
    return registry.create_loss(name, **{**accepted_context(builder, context), **given})


def each_row(loss: Loss, logits: Tensor, target: Tensor) -> Tensor:
    """The loss [B] of each row by itself: in one call where the loss keeps rows apart, else in a call a row."""
    if isinstance(loss, ClassificationLoss) and loss.class_weight is None:  # a mean of one row undoes its weight
        before, loss.reduction = loss.reduction, "none"
        try:
            return loss(logits, target)
        finally:
            loss.reduction = before
    return torch.stack([loss(row[None], label[None]) for row, label in zip(logits, target, strict=True)])


def numbers_of(name: str, **wanted: Any) -> str:
    """A loss's own options that are numbers, as ``k=5 tau=0.1``: those ``wanted`` that it takes, its defaults else.

    timm's losses share one factory, whose options are not those of the one loss: they have none here.
    """
    if registry.loss_info(name).distribution == "timm":
        return ""
    parameters = inspect.signature(registry.get_loss_builder(name)).parameters.values()
    values = {each.name: wanted.get(each.name, each.default) for each in parameters if each.name not in NOT_OWN}
    numbers = {option: value for option, value in values.items() if isinstance(value, (int, float))}
    return " ".join(f"{option}={value:g}" for option, value in numbers.items() if not isinstance(value, bool))


def grid_of(name: str) -> list[dict[str, Any]]:
    """The points of a loss's own grid for tuning, as flags of a training run; its defaults where it declares none."""
    grid = tuning_grid(registry.get_loss_builder(name))
    flags = TRAINED_WITH.get(name, {})
    points = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    return [{**flags, **({"loss_opt": point} if point else {})} for point in points]
