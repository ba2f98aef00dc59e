"""The losses of timm, with the names that timm gives them. Plug-ins cannot have these names."""

import inspect
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
SMOOTHED = ("smoothing", "soft_targets")
OPTIONS: dict[str, tuple[str, ...]] = {  # the options of timm's function that a loss reads
    "ce": SMOOTHED,
    "bce": (*SMOOTHED, "class_weight", "pos_weight", "bce_target_thresh", "bce_sum"),
    "asl": (*SMOOTHED, "asl_gamma_pos", "asl_gamma_neg"),
    "poly": (*SMOOTHED, "poly_epsilon"),
    "jsd": ("smoothing", "jsd_splits"),
    "twoway": (*SMOOTHED, "twoway_tp", "twoway_tn"),
    "zlpr": SMOOTHED,
    "db": (*SMOOTHED, "class_counts", "num_samples", "db_neg_scale", "db_init_bias", "db_focal_gamma"),
}
SEVERAL: dict[str, tuple[str, ...]] = {  # further options that a loss reads if images have several labels
    "asl": ("class_weight", "pos_weight", "asl_clip", "asl_reduction"),
    "poly": ("poly_gamma", "poly_alpha"),
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
    """Import timm, and return a function that takes the options of the timm loss ``name`` and creates the loss.

    If ``several`` is True, the function creates the form of the loss for images with several labels.
    """
    create = import_module("timm.loss").create_classification_loss
    named = inspect.signature(create).parameters
    own = OPTIONS[name] + (SEVERAL.get(name, ()) if several else ())
    options = [named[option].replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in own if option in named]
    factory: Any = partial(create, name, multi_label=several)
    factory.__signature__ = inspect.Signature(options)  # timm's function has the options of all losses
    factory.option_owners = {option: owners(option) for option in named if option not in own}
    return factory


def owners(option: str) -> list[str]:
    """Return the timm losses that have an option, such as ["bce", "asl with --task multilabel"] for pos_weight."""
    single = [name for name in OPTIONS if option in OPTIONS[name]]
    return single + [f"{name} with --task multilabel" for name in SEVERAL if option in SEVERAL[name]]
