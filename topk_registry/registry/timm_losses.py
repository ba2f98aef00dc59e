"""timm's own losses, under timm's own names: reserved here, and passed through to timm's builder."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from topk_registry.registry.discovery import Plugin, installed_version
from topk_registry.registry.errors import BrokenPluginError
from topk_registry.registry.source import read

SUMMARIES = {
    "ce": "Softmax cross-entropy, with label smoothing or soft targets.",
    "bce": "Binary cross-entropy over one-hot, smoothed or mixed targets.",
    "asl": "Asymmetric loss.",
    "poly": "Poly-1 cross-entropy.",
    "jsd": "Jensen-Shannon divergence over augmentation splits, with cross-entropy.",
    "twoway": "Two-way loss, multi-label.",
    "zlpr": "ZLPR loss, multi-label.",
    "db": "Distribution-balanced loss, multi-label.",
}
VALUE = "timm.loss:create_classification_loss"
ONLY_K_HOT = ("twoway", "zlpr", "db")  # timm refuses them for one label per image
TAKE_K_HOT = ("bce", "asl", "poly", "twoway", "zlpr", "db")  # timm.loss.MULTI_LABEL_LOSS_TYPES


def reserved() -> dict[str, Plugin]:
    """Return timm's names, each owned by the installed timm."""
    return {name: Plugin(name, VALUE, "timm", installed_version("timm") or "") for name in SUMMARIES}


def builder(name: str, *, several: bool = False) -> Callable[..., Any]:
    """Return timm's builder of one of its losses, which imports timm and torch.

    Args:
        name: one of timm's.
        several: whether targets are k-hot.
    """
    module, attr = VALUE.split(":")
    try:
        create = getattr(import_module(module), attr)
    except (ImportError, AttributeError) as error:
        raise BrokenPluginError(f"loss {name!r} is timm's: {problem() or error}") from error
    # timm refuses class counts except for 'db', and weights except for 'bce' and, of several labels, 'asl': what is
    # bound here is not filled in from a trainer's context
    weighted = ("bce", "asl") if several else ("bce",)
    others = {"class_counts": ("db",), "num_samples": ("db",), "class_weight": weighted, "pos_weight": weighted}
    bound = {fact: None for fact, losses in others.items() if name not in losses}
    return partial(create, name, **bound, **({"multi_label": True} if several else {}))


def problem() -> str:
    """Return why the installed timm cannot build its losses, or nothing."""
    installed = installed_version("timm")
    if not installed:
        return "timm is not installed"
    module, attr = VALUE.split(":")
    try:
        text = read(module)
    except Exception:  # building the loss shows the error
        return ""
    return "" if attr in (text or attr) else f"timm {installed} has no {module}.{attr}; 1.0.31 has"
