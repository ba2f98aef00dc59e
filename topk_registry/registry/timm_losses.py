"""timm's own losses, under timm's own names: reserved here, and passed through to timm's builder."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from topk_registry.registry.discovery import Plugin
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
ONLY_K_HOT = ("twoway", "zlpr", "db")  # refused by timm for one label an image
TAKE_K_HOT = ("bce", "asl", "poly", "twoway", "zlpr", "db")  # timm.loss.MULTI_LABEL_LOSS_TYPES


def reserved() -> dict[str, Plugin]:
    """timm's names, each owned by the installed timm."""
    return {name: Plugin(name, VALUE, "timm", installed()) for name in SUMMARIES}


def builder(name: str, *, several: bool = False) -> Callable[..., Any]:
    """Return timm's builder of one of its losses, which imports timm and torch.

    Args:
        name: one of timm's.
        several: whether the loss is for k-hot targets, several labels an image.
    """
    module, attr = VALUE.split(":")
    try:
        create = getattr(import_module(module), attr)
    except (ImportError, AttributeError) as error:
        raise BrokenPluginError(f"loss {name!r} is timm's: {problem() or error}") from error
    # timm refuses class counts for every loss but 'db', and weights for every loss but 'bce' and, of several labels,
    # 'asl': a value bound here is not filled in from a trainer's context
    weighted = ("bce", "asl") if several else ("bce",)
    others = {"class_counts": ("db",), "num_samples": ("db",), "class_weight": weighted, "pos_weight": weighted}
    bound = {fact: None for fact, losses in others.items() if name not in losses}
    return partial(create, name, **bound, **({"multi_label": True} if several else {}))


def problem() -> str:
    """Return why timm cannot build its losses, from its source, or nothing where it can."""
    module, attr = VALUE.split(":")
    if not installed():
        return "timm is not installed"
    try:
        text = read(module)
    except Exception:  # an unreadable source tells nothing; building the loss shows the error
        return ""
    return "" if attr in (text or attr) else f"timm {installed()} has no {module}.{attr}; 1.0.31 has"


def installed() -> str:
    try:
        return version("timm")
    except PackageNotFoundError:
        return ""
