"""The argument parser of every command: usage errors are one line that points to ``--help``."""

import argparse
import ast
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn


class ArgumentParser(argparse.ArgumentParser):
    """Parser of command-line arguments whose usage errors are one line, with the closest flag for an unknown one."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(self._unrecognized(unknown))
        return parsed

    def _unrecognized(self, unknown: list[str]) -> str:
        flag = unknown[0].partition("=")[0]
        close = get_close_matches(flag, self._option_string_actions, n=1, cutoff=0.75) if flag.startswith("--") else []
        hint = f" (did you mean {close[0]}?)" if close else ""
        return f"unrecognized arguments: {' '.join(unknown)}{hint}"


class ParseOptions(argparse.Action):
    """``key=value`` pairs, values read as Python literals; a repeated flag adds to the pairs before it."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        options = dict(getattr(namespace, self.dest, None) or {})
        for pair in values:
            key, equals, value = pair.partition("=")
            if not equals or not key:
                parser.error(f"{option_string} takes key=value, got {pair!r}")
            options[key] = _literal(value)
        setattr(namespace, self.dest, options)


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def positive(text: str) -> int:
    """A whole number of at least 1, as the ``type`` of a flag."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
