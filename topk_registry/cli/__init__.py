"""The command line, ``topk-registry COMMAND ...``, and what its commands share: argument parser and types of flags."""

import argparse
import ast
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from topk_registry.registry.ranges import Interval
from topk_registry.registry.source import closest

INTERRUPTED = 130  # the shell's status of a command that Ctrl-C ends


class ArgumentParser(argparse.ArgumentParser):
    """Parser of command-line arguments whose usage errors are one line, with the closest flag for an unknown one.

    Flags are written in full: ``--margin 3`` is no short form of ``--marginal-temperature 3``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(self._unrecognized(unknown))
        return parsed

    def _unrecognized(self, unknown: list[str]) -> str:
        flag, message = unknown[0].partition("=")[0], f"unrecognized arguments: {' '.join(unknown)}"
        flags = [name for action in self._actions for name in action.option_strings]
        if flag.startswith("--"):
            message += closest(flag, flags)
            if "--loss-opt" in flags:
                message += f"; an option of the loss is given as --loss-opt {flag[2:].replace('-', '_')}=VALUE"
        return message


class ParseOptions(argparse.Action):
    """``key=value`` pairs, values read as Python literals; a repeated flag adds to the pairs before it."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        try:
            options = {**(getattr(namespace, self.dest, None) or {}), **parse_pairs(values)}
            setattr(namespace, self.dest, options)
        except ValueError as error:
            parser.error(f"{option_string} {error}")


def parse_pairs(words: Sequence[str]) -> dict[str, Any]:
    """Read ``key=value`` pairs, values as Python literals; a word that is none is a ValueError."""
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


def within(interval: str, kind: Callable[[str], Any] = float, hint: str = "") -> Callable[[str], Any]:
    """The ``type`` of a flag that takes numbers of an interval, such as ``"(0, 1]"``; its errors end in a hint."""
    numbers = Interval.parse(interval)

    def number(text: str) -> Any:
        value = kind(text)
        if value not in numbers:
            raise argparse.ArgumentTypeError(f"must be in {numbers}, got {text}{hint}")
        return value

    number.__name__ = "integer" if kind is int else "number"  # argparse calls other text an invalid one of these
    return number


positive = within("[1, inf)", int)


def words_of(error: BaseException) -> str:
    """An error as a line: of the system's, the file before what is wrong with it, without its number."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)
