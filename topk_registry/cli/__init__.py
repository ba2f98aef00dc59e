"""Parts that all commands of ``topk-registry`` share: the argument parser, types of flags, and error messages."""

import argparse
import ast
import importlib
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from topk_registry import registry
from topk_registry.registry.ranges import Interval
from topk_registry.registry.source import closest

INTERRUPTED = 130  # the exit status that shells report for a command that Ctrl-C ended


class ArgumentParser(argparse.ArgumentParser):
    """Argument parser that prints usage errors on one line and exits with status 2. Flags cannot be abbreviated.

    Args:
        elsewhere: error messages for flags that only another program has, by flag.
    """

    def __init__(self, *args: Any, elsewhere: Mapping[str, str] = MappingProxyType({}), **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})
        self.elsewhere = elsewhere

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        for word in args or ():
            if message := self.elsewhere.get(word.partition("=")[0]):
                self.error(message)
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flag, message = unknown[0].partition("=")[0], f"unrecognized arguments: {' '.join(unknown)}"
            flags = [name for action in self._actions for name in action.option_strings]
            if flag.startswith("--"):
                message += closest(flag, flags)
                if "--loss-opt" in flags:
                    message += f"; an option of the loss is given as --loss-opt {flag[2:].replace('-', '_')}=VALUE"
            self.error(message)
        return parsed


class ParseOptions(argparse.Action):
    """Argparse action that adds ``key=value`` arguments to a dictionary, see :func:`parse_pairs`."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        try:
            setattr(namespace, self.dest, (getattr(namespace, self.dest, None) or {}) | parse_pairs(values))
        except ValueError as error:
            parser.error(f"{option_string} {error}")


def parse_pairs(words: Sequence[str]) -> dict[str, Any]:
    """Parse words such as ``k=5`` and ``a=b`` into ``{"k": 5, "a": "b"}``. If a word has no key, raise a ValueError."""
    options = {}
    for pair in words:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ValueError(f"takes key=value, got {pair!r}")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value
    return options


def ticker(seconds: float = 3.0) -> Callable[[str], None]:
    """Return a function that prints a message on stderr, unless the last message is less than ``seconds`` ago."""
    last = time.monotonic()

    def tick(message: str) -> None:
        nonlocal last
        if time.monotonic() - last >= seconds:
            last = time.monotonic()
            print(message, file=sys.stderr, flush=True)

    return tick


def within(interval: str, kind: Callable[[str], Any] = float) -> Callable[[str], Any]:
    """Return a function for argparse's ``type`` that converts text to a number in an interval such as ``"(0, 1]"``."""
    numbers = Interval.parse(interval)

    def number(text: str) -> Any:
        value = kind(text)
        if value not in numbers:
            raise argparse.ArgumentTypeError(f"must be in {numbers}, got {text}")
        return value

    number.__name__ = "integer" if kind is int else "number"  # argparse writes "invalid number value"
    return number


positive = within("[1, inf)", int)


def words_of(error: BaseException) -> str:
    """Return the message of an exception. For an OSError with a file name, the message is ``file: reason``."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def reason_of(error: BaseException) -> str:
    """Return the message of a TypeError or ValueError. For any other exception, also name its class and its place."""
    if isinstance(error, (TypeError, ValueError)) and str(error):
        return str(error)
    message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return " at ".join([message, *places_of(error)[-1:]])


def places_of(error: BaseException) -> list[str]:
    """Return ``file:line`` of the first and of the last call that raised ``error``, with the source of the lines.

    Calls of Python's import system and of the registries are left out.
    """
    inner = ("<frozen", str(Path(importlib.__file__).parent), str(Path(registry.__file__).parent))
    calls = [call for call in traceback.extract_tb(error.__traceback__) if not call.filename.startswith(inner)]
    places = [f"{call.filename}:{call.lineno}: {call.line}" for call in calls]
    return list(dict.fromkeys([*places[:1], *places[-1:]]))
