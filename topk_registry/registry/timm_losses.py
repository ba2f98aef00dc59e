"""The losses of timm, with the names that timm gives them. Plug-ins cannot have these names."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from topk_registry.registry.discovery import Plugin, installed_version

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
TAKE_K_HOT = ("bce", "asl", "poly", "twoway", "zlpr", "db")  # timm.loss.MULTI_LABEL_LOSS_TYPES


def reserved() -> dict[str, Plugin]:
    """Return a dictionary with one plug-in per timm loss. The keys are the names of the losses."""
    version = installed_version("timm") or ""
    return {name: Plugin(name, f"{__name__}:{name}", "timm", version, about=SUMMARIES[name]) for name in SUMMARIES}


def __getattr__(name: str) -> Callable[..., Any]:
    if name in SUMMARIES:
        return builder(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def builder(name: str, *, several: bool = False) -> Callable[..., Any]:
    """Import timm, and return a function that takes options and creates the timm loss ``name``.

    If ``several`` is True, the function creates the form of the loss for images with several labels.
    """
    create = import_module("timm.loss").create_classification_loss
    # timm accepts class counts only for 'db', and weights only for 'bce' and multi-label 'asl'. For the other losses,
    # partial sets these arguments to None, and then a trainer does not pass a value.
    weighted = ("bce", "asl") if several else ("bce",)
    others = {"class_counts": ("db",), "num_samples": ("db",), "class_weight": weighted, "pos_weight": weighted}
    bound = {fact: None for fact, losses in others.items() if name not in losses}
    return partial(create, name, **bound, **({"multi_label": True} if several else {}))
