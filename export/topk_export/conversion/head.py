"""The layer that a model's scores come from, found by running it."""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from topk_export.errors import ExportError
from topk_registry.nn.classifier import CosineClassifier, find_classifier

LAYERS = (nn.Linear, CosineClassifier)


def run_and_find(model: nn.Module, x: Tensor, head: str | None) -> tuple[Any, str | None]:
    """Return the model's output, and the name of its head; None where it has none.

    The libraries' models name their heads. In any other the head is the last layer with weights that runs, if it is
    linear; or the module that ``head`` names, which then must run.
    """
    names = {module: name for name, module in model.named_modules()}
    if head is not None and head not in names.values():
        linear = ", ".join(name for module, name in names.items() if isinstance(module, LAYERS)) or "none"
        raise ExportError(f"the model has no module {head!r} (head, --head); its linear layers: {linear}")
    ran: dict[nn.Module, None] = {}

    def note(module: nn.Module, *_: object) -> None:
        ran.pop(module, None)
        ran[module] = None

    with ExitStack() as hooks, torch.no_grad():
        for module in names:
            weights = isinstance(module, LAYERS) or next(module.parameters(recurse=False), None) is not None
            if weights or names[module] == head:
                hooks.callback(module.register_forward_hook(note).remove)
        out = model(x)
    if head is not None:
        return out, head if any(names[module] == head for module in ran) else None
    if _of_a_library(model):
        try:
            return out, find_classifier(model)[0][0]
        except ValueError:
            return out, None
    last = next(reversed(ran), None)
    return out, names[last] if last is not None and _is_linear(last) else None


def _of_a_library(model: nn.Module) -> bool:
    return hasattr(model, "get_classifier") or type(model).__module__.startswith("torchvision.")


def _is_linear(layer: nn.Module) -> bool:
    return isinstance(layer, LAYERS) or (isinstance(layer, nn.Conv2d) and layer.kernel_size == (1, 1))
