"""Every flag of every command explains itself, and a number out of range is a one-line error."""

import argparse

import pytest

from topk_registry.cli import ArgumentParser
from topk_registry.cli.commands import GROUPS, commands

COMMANDS = [name for names in GROUPS.values() for name in names if name in commands and name != "run"]
ANY_SIGN: set[tuple[str, str]] = set()


class ParserFoundError(Exception):
    pass


def flags_of(command, monkeypatch):
    found = []

    def stop(parser, args=None, namespace=None):
        found.append(parser)
        raise ParserFoundError

    with monkeypatch.context() as patch:
        patch.setattr(ArgumentParser, "parse_known_args", stop)
        patch.setattr(ArgumentParser, "parse_args", stop)
        with pytest.raises(ParserFoundError):
            commands.builder(command)([])
    return found[0]


@pytest.mark.parametrize("command", COMMANDS)
def test_flags_have_help_and_numbers_a_range(command, monkeypatch, capsys):
    parser = flags_of(command, monkeypatch)
    assert parser.description
    taken = []
    for action in parser._actions:
        flag = action.option_strings[-1] if action.option_strings else action.dest
        assert action.help, flag
        kind = getattr(action.type, "__name__", "")
        if kind not in ("int", "float", "integer", "number") or not action.option_strings:
            continue
        wrong = ["nan", "-1e999", "three"] if (command, flag) in ANY_SIGN else ["nan", "-1e999", "three", "-7"]
        for text in wrong:
            try:
                action.type(text)
            except (ValueError, argparse.ArgumentTypeError):
                continue
            taken.append(f"{flag} {text}")
    assert not taken
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["--no-such-flag", "1"])
    assert ended.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
