"""The options that a factory takes, read from its signature."""

import inspect
import sys
import typing
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import partial
from typing import Any

CONTEXT = ("num_classes", "class_counts", "smoothing", "soft_targets", "total_epochs")
SET_BY_TRAINERS = ("weight", "class_weight", "pos_weight", "label_smoothing", "reduction", "ignore_index")
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def accepted_context(builder: Callable[..., Any], context: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a trainer's context that a factory's signature names.

    Args:
        builder: a class, a function or a ``functools.partial`` of one; arguments that a partial has bound stay bound.
        context: values by the names of ``CONTEXT``.

    Example:
        >>> accepted_context(lambda k=5, num_classes=None: ..., {"num_classes": 10, "total_epochs": 90})
        {'num_classes': 10}
    """
    if unknown := sorted(set(context) - set(CONTEXT)):
        raise ValueError(f"context has the names {', '.join(CONTEXT)}, got {', '.join(unknown)}")
    return {name: value for name, value in context.items() if accepts(builder, name)}


def accepts(builder: Callable[..., Any], option: str) -> bool:
    """Return whether a factory's signature names an option and leaves it open."""
    return option in parameters(builder)[0] and option not in _bound(builder)


def takes(builder: Callable[..., Any], option: str) -> bool:
    """Return whether a factory may be given an option; a signature with an unresolved ``**kwargs`` takes any."""
    named, takes_any = parameters(builder)
    return takes_any or option in named


def defaults(builder: Callable[..., Any]) -> dict[str, Any]:
    """Return the defaults of a factory's options, by name."""
    return {name: p.default for name, p in parameters(builder)[0].items() if p.default is not p.empty}


def recorded_defaults(builder: Callable[..., Any], options: Iterable[str] = ()) -> dict[str, Any]:
    """Return the defaults that a run records, as plain types: those of options that neither the user nor a trainer set.

    Example:
        >>> recorded_defaults(lambda k=5, tau=1.0, weight=None, num_classes=None: ..., ["k"])
        {'tau': 1.0}
    """
    left_out = {*options, *CONTEXT, *SET_BY_TRAINERS, *_bound(builder)}
    found = {name: value for name, value in defaults(builder).items() if name not in left_out}
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}
    return {name: value for name, value in plain.items() if _is_plain(value)}


def unbound(builder: Callable[..., Any]) -> Callable[..., Any]:
    """Return the class or function below any ``functools.partial``."""
    while isinstance(builder, partial):
        builder = builder.func
    return builder


def tuning_grid(builder: Callable[..., Any]) -> dict[str, list[Any]]:
    """Return the values to try for each option when a loss is tuned: the factory's attribute ``tuning_grid``.

    Example:
        >>> class TheirLoss:
        ...     tuning_grid = {"tau": (0.1, 1.0)}
        >>> tuning_grid(TheirLoss)
        {'tau': [0.1, 1.0]}
    """
    return {option: list(values) for option, values in getattr(unbound(builder), "tuning_grid", {}).items()}


def check_options(what: str, builder: Callable[..., Any], options: Iterable[str], also: Iterable[str] = ()) -> None:
    """Raise a TypeError that names an option that the factory does not take, or misses.

    Args:
        what: the factory, for messages.
        builder: the factory.
        options: that it is to be given.
        also: further options to suggest, which somebody else reads.
    """
    named, takes_any = parameters(builder)
    known = [*named, *also]
    listing = f"it takes {', '.join(known) or 'no options'}"
    for option in () if takes_any else options:
        if option not in named:
            close = get_close_matches(option, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"{what} takes no option {option!r}{hint} ({listing})")
    missing = [name for name, p in named.items() if p.default is p.empty and name not in set(options)]
    if len({*missing} - {*CONTEXT}) >= 2 and not isinstance(unbound(builder), type):
        raise TypeError(
            f"{what} must be a factory, which takes options and returns the loss; got a function of "
            f"{', '.join(missing)}: if this is the loss itself, register a function that returns it"
        )
    if missing:
        raise TypeError(f"{what} needs {', '.join(missing)} ({listing})")


def parameters(builder: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return a factory's options by name, and whether it takes any other.

    ``**common`` of a class stands for the options of its bases, and ``**options: Unpack[SomeTypedDict]`` for the keys
    of the dictionary. Other ``**kwargs``, and builtins without a signature, take any option.
    """
    try:
        signature = inspect.signature(builder)
    except (TypeError, ValueError):
        return {}, True
    named = {name: p for name, p in signature.parameters.items() if p.kind in _BY_NAME}
    rest = _var_keyword(signature)
    if rest is None:
        return named, False
    target = unbound(builder)
    keys = _typed_dict(rest.annotation, target)
    if keys is not None:  # these and no others
        defaults = parameters(_base(target))[0] if isinstance(target, type) else {}
        required = getattr(keys, "__required_keys__", ())
        for key in keys.__annotations__:
            default = inspect.Parameter.empty if key in required else None
            plain = inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default)
            named.setdefault(key, defaults.get(key, plain))
        return named, False
    if isinstance(target, type):
        for base in [each for each in target.__mro__ if "__init__" in vars(each)][1:]:
            if base is object or base.__module__.startswith("torch.nn.modules"):
                break
            signature = inspect.signature(base.__init__)
            inherited = list(signature.parameters.values())[1:]
            named = {**{p.name: p for p in inherited if p.kind in _BY_NAME}, **named}
            if _var_keyword(signature) is None:
                return _own_first(named, builder), False
    return named, True


def _base(target: type) -> type:
    """Return the next class whose constructor gets the ``**common`` of a class."""
    return next((each for each in target.__mro__[1:] if "__init__" in vars(each)), object)


def _own_first(named: dict[str, inspect.Parameter], builder: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    own = [name for name in inspect.signature(builder).parameters if name in named]
    return {name: named[name] for name in [*own, *(name for name in named if name not in own)]}


def _var_keyword(signature: inspect.Signature) -> inspect.Parameter | None:
    return next((p for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)


def _typed_dict(annotation: Any, target: Any) -> Any:
    """The dictionary type of ``Unpack[TheType]``, or None."""
    if isinstance(annotation, str):
        module = sys.modules.get(getattr(target, "__module__", ""), typing)
        try:
            annotation = eval(annotation, vars(module))
        except Exception:  # a name that is imported for type checkers only
            return None
    inner = next(iter(typing.get_args(annotation)), None)
    return inner if hasattr(inner, "__required_keys__") else None


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _bound(builder: Callable[..., Any]) -> set[str]:
    return {*builder.keywords, *_bound(builder.func)} if isinstance(builder, partial) else set()
