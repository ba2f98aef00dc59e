"""Any registered loss, a third party's too, with what its signature asks for."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from topk_registry import registry
from topk_registry.registry.options import accepted_context, accepts

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
