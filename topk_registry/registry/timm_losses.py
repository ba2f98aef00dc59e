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


def reserved() -> dict[str, Plugin]:
    """timm's names, each owned by the installed timm."""
    return {name: Plugin(name, VALUE, "timm", installed()) for name in SUMMARIES}


def builder(name: str) -> Callable[..., Any]:
    """Return timm's builder of one of its losses, which imports timm and torch."""
    module, attr = VALUE.split(":")
    try:
        create = getattr(import_module(module), attr)
    except (ImportError, AttributeError) as error:
        raise BrokenPluginError(f"loss {name!r} is timm's: {problem() or error}") from error
    # timm refuses class counts for every loss but 'db', and class weights of single labels for every loss but 'bce': a
    # value bound here is not filled in from a trainer's context
    others = {"db": "class_counts", "bce": "class_weight"}
    return partial(create, name, **{fact: None for loss, fact in others.items() if loss != name})


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
