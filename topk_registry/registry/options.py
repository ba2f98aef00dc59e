"""The options of a factory, read from its signature."""

import inspect
import sys
import typing
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from topk_registry.registry.source import closest

CONTEXT = ("num_classes", "class_counts", "smoothing", "soft_targets", "total_epochs")
SET_BY_TRAINERS = ("weight", "class_weight", "pos_weight", "label_smoothing", "reduction", "ignore_index")


def accepted_context(builder: Callable[..., Any], context: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a trainer's context that a factory has as options. The names are in ``CONTEXT``.

    Example:
        >>> accepted_context(lambda k=5, num_classes=None: ..., {"num_classes": 10, "total_epochs": 90})
        {'num_classes': 10}
    """
    if unknown := sorted(set(context) - set(CONTEXT)):
        raise ValueError(f"context has the names {', '.join(CONTEXT)}, got {', '.join(unknown)}")
    return {name: value for name, value in context.items() if accepts(builder, name)}


def accepts(builder: Callable[..., Any], option: str) -> bool:
    """Return whether a factory has an option that is not already bound by ``functools.partial``."""
    return option in parameters(builder)[0] and option not in _bound(builder)


def recorded_defaults(builder: Callable[..., Any], options: Iterable[str] = ()) -> dict[str, Any]:
    """Return the defaults to record for a run: plain values of options that neither the user nor the trainer set."""
    left_out = {*options, *CONTEXT, *SET_BY_TRAINERS, *_bound(builder)}
    found = {name: p.default for name, p in parameters(builder)[0].items() if name not in left_out}
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}
    return {name: value for name, value in plain.items() if _is_plain(value)}


def unbound(builder: Callable[..., Any]) -> Callable[..., Any]:
    return unbound(builder.func) if isinstance(builder, partial) else builder


def tuning_grid(builder: Callable[..., Any]) -> dict[str, list[Any]]:
    """Return the values to try per option when a loss is tuned, from the attribute ``tuning_grid`` of the factory."""
    return {option: list(values) for option, values in getattr(unbound(builder), "tuning_grid", {}).items()}


def check_options(what: str, builder: Callable[..., Any], options: Iterable[str], also: Iterable[str] = ()) -> None:
    """Raise a TypeError if a factory lacks one of the options or requires another; ``also`` are further suggestions."""
    named, takes_any = parameters(builder)
    known = [*named, *also]
    listing = f"it takes {', '.join(known) or 'no options'}"
    for option in () if takes_any else options:
        if option not in named:
            raise TypeError(f"{what} takes no option {option!r}{closest(option, known)} ({listing})")
    missing = [name for name, p in named.items() if p.default is p.empty and name not in set(options)]
    if len({*missing} - {*CONTEXT}) >= 2 and not isinstance(unbound(builder), type):
        raise TypeError(
            f"{what} must be a factory, which takes options and returns the loss; got a function of "
            f"{', '.join(missing)}: if this is the loss itself, register a function that returns it"
        )
    if missing:
        raise TypeError(f"{what} needs {', '.join(missing)} ({listing})")


def parameters(builder: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return the options of a factory by name, and whether it accepts any other option.

    ``**common`` of a class stands for the options of its bases. ``**options: Unpack[SomeTypedDict]`` stands for the
    keys of the dictionary. Any other ``**kwargs``, and builtins without a signature, accept any option.
    """
    target = unbound(builder)
    try:
        named, rest = _named(inspect.signature(builder))
    except (TypeError, ValueError):
        return {}, True
    keys = None if rest is None else _typed_dict(rest.annotation, target)
    below: dict[str, inspect.Parameter] = {}
    for base in target.__mro__ if rest is not None and isinstance(target, type) else ():
        if base is object or base.__module__.startswith("torch.nn.modules"):
            break
        if "__init__" in vars(base):
            inherited, rest = _named(inspect.signature(vars(base)["__init__"]))
            below = {**{name: p for name, p in inherited.items() if name != "self"}, **below}
        if rest is None:
            break
    if keys is None:
        return named | {name: p for name, p in below.items() if name not in named}, rest is not None
    for key in (key for key in keys.__annotations__ if key not in named):
        default = inspect.Parameter.empty if key in keys.__required_keys__ else None
        named[key] = below.get(key) or inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default)
    return named, False


def _named(signature: inspect.Signature) -> tuple[dict[str, inspect.Parameter], inspect.Parameter | None]:
    """Return the parameters that accept keywords, and the ``**rest`` parameter."""
    every = signature.parameters.values()
    named = {p.name: p for p in every if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return named, next((p for p in every if p.kind is p.VAR_KEYWORD), None)


def _typed_dict(annotation: Any, target: Any) -> Any:
    """Return the TypedDict in ``Unpack[TheType]``, or None."""
    if isinstance(annotation, str):
        try:
            annotation = eval(annotation, vars(sys.modules[target.__module__]))
        except Exception:  # the name may be imported for type checkers only
            return None
    inner = next(iter(typing.get_args(annotation)), None)
    return inner if hasattr(inner, "__required_keys__") else None


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _bound(builder: Callable[..., Any]) -> set[str]:
    return {*builder.keywords, *_bound(builder.func)} if isinstance(builder, partial) else set()
