"""Functions that read the options of a factory (the class or function that creates a loss) from its signature."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from topk_registry.registry.source import closest

CONTEXT = ("num_classes", "class_counts", "smoothing", "soft_targets", "total_epochs")
SET_BY_TRAINERS = ("weight", "class_weight", "pos_weight", "label_smoothing", "reduction", "ignore_index", "jsd_splits")


def accepted_context(builder: Callable[..., Any], context: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values in ``context`` whose names are options of ``builder``, the class or function of a loss.

    ``context`` contains values that a trainer knows, such as the number of classes. ``CONTEXT`` lists their names.

    Example:
        >>> accepted_context(lambda k=5, num_classes=None: ..., {"num_classes": 10, "total_epochs": 90})
        {'num_classes': 10}
    """
    return {name: value for name, value in context.items() if accepts(builder, name)}


def accepts(builder: Callable[..., Any], option: str) -> bool:
    """Return whether ``builder``, the class or function of a loss, has an option with this name.

    If ``builder`` is a ``functools.partial`` that already sets the option, return False.
    """
    bound = builder.keywords if isinstance(builder, partial) else {}
    return option in parameters(builder)[0] and option not in bound


def recorded_defaults(builder: Callable[..., Any], options: Iterable[str] = ()) -> dict[str, Any]:
    """Return the default values that a training run records for ``builder``, the class or function of a loss.

    ``options`` are the names of options that the run records already. The result leaves out these options, the options
    that trainers set (``CONTEXT``, ``SET_BY_TRAINERS``), and defaults other than numbers, strings, booleans and None.
    """
    named, left_out = parameters(builder)[0], {*options, *CONTEXT, *SET_BY_TRAINERS}
    found = {name: p.default for name, p in named.items() if name not in left_out and accepts(builder, name)}
    return {name: value for name, value in found.items() if isinstance(value, (bool, int, float, str, type(None)))}


def unbound(builder: Callable[..., Any]) -> Callable[..., Any]:
    return builder.func if isinstance(builder, partial) else builder


def tuning_grid(builder: Callable[..., Any]) -> dict[str, list[Any]]:
    """Return the values to try for each option when a loss is tuned, or an empty dictionary.

    The class or function of the loss (``builder``) declares these values in the attribute ``tuning_grid``.
    """
    return {option: list(values) for option, values in getattr(unbound(builder), "tuning_grid", {}).items()}


def check_options(what: str, builder: Callable[..., Any], options: Iterable[str], also: Iterable[str] = ()) -> None:
    """Raise TypeError if ``builder`` has no option of a given name, or if a required option is missing.

    If ``builder`` has an attribute ``option_owners``, the message names the losses that have the option.

    Args:
        what: name of ``builder`` in the message, such as "loss 'topk_nll'".
        builder: class or function that is called with the options.
        options: names of the given options.
        also: options that the caller applies itself, without ``builder``. The message lists these options too.
    """
    named, takes_any = parameters(builder)
    known = [*named, *also]
    listing = f"it takes {', '.join(known) or 'no options'}"
    for option in () if takes_any else options:
        if option not in named:
            owners = getattr(builder, "option_owners", {}).get(option)
            hint = f", which belongs to {', '.join(owners)}" if owners else closest(option, known)
            raise TypeError(f"{what} takes no option {option!r}{hint} ({listing})")
    missing = [name for name, p in named.items() if p.default is p.empty and name not in set(options)]
    if missing:  # two missing options can be logits and target, if the loss was registered instead of its factory
        hint = "; a factory takes options and returns the loss" if len(missing) > 1 else ""
        raise TypeError(f"{what} needs {', '.join(missing)} ({listing}){hint}")


def parameters(builder: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return the options of ``builder`` by name, and whether ``builder`` also accepts options with any other name.

    If ``builder`` is a class and its constructor has a parameter such as ``**kwargs``, the options of the base class
    are included. A function with such a parameter accepts any option.
    """
    target = unbound(builder)
    named, takes_any = named_parameters(builder)
    for base in target.__mro__ if isinstance(target, type) else ():
        if not takes_any or base is object or base.__module__.startswith("torch.nn.modules"):
            break
        if "__init__" in vars(base):
            inherited, takes_any = named_parameters(vars(base)["__init__"])
            named |= {name: p for name, p in inherited.items() if name not in {"self", *named}}
    return named, takes_any


def named_parameters(function: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return the parameters that the signature of a function names, and whether the function accepts other names.

    Annotations that are texts are evaluated if possible. A text may have names that exist for type checkers only.
    """
    try:
        signature = inspect.signature(function, eval_str=True)
    except Exception:  # evaluation of a text can raise any error
        signature = inspect.signature(function)
    every = signature.parameters.values()
    named = {p.name: p for p in every if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return named, any(p.kind is p.VAR_KEYWORD for p in every)
