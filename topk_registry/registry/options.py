"""The options that a factory takes, read from its signature."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import partial
from typing import Any

CONTEXT = ("num_classes", "class_counts", "smoothing", "soft_targets", "total_epochs")
SET_BY_TRAINERS = ("weight", "class_weight", "pos_weight", "label_smoothing", "reduction", "ignore_index")
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def accepted_context(builder: Callable[..., Any], context: Mapping[str, Any]) -> dict[str, Any]:
    """Select the part of a trainer's context that a factory's signature names.

    ``**kwargs`` names nothing, and arguments that a ``functools.partial`` has bound stay bound.

    Args:
        builder: a class, a function or a partial of one.
        context: values by the names of ``CONTEXT``.

    Example:
        >>> accepted_context(lambda k=5, num_classes=None: ..., {"num_classes": 10, "total_epochs": 90})
        {'num_classes': 10}
    """
    unknown = sorted(set(context) - set(CONTEXT))
    if unknown:
        raise ValueError(f"context has the names {', '.join(CONTEXT)}, got {', '.join(unknown)}")
    return {name: value for name, value in context.items() if accepts(builder, name)}


def accepts(builder: Callable[..., Any], option: str) -> bool:
    """Return whether a factory's signature names an option and leaves it open; ``**kwargs`` names nothing."""
    return option in (_named(builder) or {}) and option not in _bound(builder)


def takes(builder: Callable[..., Any], option: str) -> bool:
    """Return whether a factory may be given an option; ``**kwargs``, and a signature that tells nothing, take any."""
    return option in (_named(builder) or {}) or _takes_any(builder)


def defaults(builder: Callable[..., Any]) -> dict[str, Any]:
    """The defaults of a factory's options, by name, as far as its signature tells."""
    return {name: p.default for name, p in (_named(builder) or {}).items() if p.default is not p.empty}


def recorded_defaults(builder: Callable[..., Any], options: Iterable[str] = ()) -> dict[str, Any]:
    """The defaults that a run records: those of the factory's own options but for ``options``, as plain types.

    Options that a trainer sets from its own flags, such as class weights and smoothing, are no part of it.

    Example:
        >>> recorded_defaults(lambda k=5, tau=1.0, weight=None, num_classes=None: ..., ["k"])
        {'tau': 1.0}
    """
    left_out = {*options, *CONTEXT, *SET_BY_TRAINERS, *_bound(builder)}
    plain = {name: _plain(value) for name, value in defaults(builder).items() if name not in left_out}
    return {name: value for name, value in plain.items() if _is_plain(value)}


def defaults_since_changed(builder: Callable[..., Any], record: Mapping[str, Any] | None) -> dict[str, Any]:
    """The defaults that a run began with and that its loss has no longer, so that the run keeps its meaning.

    Args:
        builder: today's factory of the loss.
        record: what the run wrote of its loss, its ``defaults`` among it. A run that wrote none has those that the
            factory declares as ``former_defaults``. None: there is no run.

    Example:
        >>> defaults_since_changed(lambda k=5, tau=0.1: ..., {"defaults": {"k": 5, "tau": 1.0}})
        {'tau': 1.0}
    """
    if not isinstance(record, Mapping):
        return {}
    before = record.get("defaults", getattr(unbound(builder), "former_defaults", {}))
    if not isinstance(before, Mapping):  # a file of settings that was edited
        return {}
    now = recorded_defaults(builder)
    return {name: value for name, value in before.items() if name in now and now[name] != value}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def unbound(builder: Callable[..., Any]) -> Callable[..., Any]:
    """The class or function that a factory calls, below any ``functools.partial``."""
    while isinstance(builder, partial):
        builder = builder.func
    return builder


def tuning_grid(builder: Callable[..., Any]) -> dict[str, list[Any]]:
    """The values to try for each option when a loss is tuned, as its factory declares them; empty where it does not.

    A factory declares them as ``tuning_grid``, an attribute or a method without arguments.

    Example:
        >>> class TheirLoss:
        ...     tuning_grid = {"tau": (0.1, 1.0)}
        >>> tuning_grid(TheirLoss)
        {'tau': [0.1, 1.0]}
    """
    declared: Any = getattr(unbound(builder), "tuning_grid", {})
    grid: Any = declared() if callable(declared) else declared
    return {option: list(values) for option, values in grid.items()}


def check_options(what: str, builder: Callable[..., Any], options: Iterable[str], also: Iterable[str] = ()) -> None:
    """Raise a TypeError that names the options that a factory does not take, or misses; ``also`` lists further ones."""
    named = _named(builder)
    if named is None:
        return
    takes = f"it takes {', '.join([*named, *also]) or 'no options'}"
    if not _takes_any(builder):
        for option in options:
            if option not in named:
                close = get_close_matches(option, [*named, *also], n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise TypeError(f"{what} takes no option {option!r}{hint} ({takes})")
    missing = [name for name, p in named.items() if p.default is p.empty and name not in set(options)]
    if missing and missing[-1] == "target":
        raise TypeError(
            f"{what} must be a factory, a function of options that returns the loss; got a function of "
            f"{', '.join(named)}, the loss itself"
        )
    if missing:
        raise TypeError(f"{what} needs {', '.join(missing)} ({takes})")


def _named(builder: Callable[..., Any]) -> dict[str, inspect.Parameter] | None:
    signature = _signature(builder)
    if signature is None:
        return None
    return {name: p for name, p in signature.parameters.items() if p.kind in _BY_NAME}


def _takes_any(builder: Callable[..., Any]) -> bool:
    signature = _signature(builder)
    return signature is None or any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())


def _signature(builder: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(builder)
    except (TypeError, ValueError):  # a builtin that tells nothing
        return None


def _bound(builder: Callable[..., Any]) -> set[str]:
    return {*builder.keywords, *_bound(builder.func)} if isinstance(builder, partial) else set()
