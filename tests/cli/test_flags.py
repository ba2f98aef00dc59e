"""Every flag of every command explains itself, and a number out of range is a one-line error that names the flag."""

import re

import pytest

from topk_registry.cli import ArgumentParser
from topk_registry.cli.commands import CORE, commands
from topk_registry.train import config

COMMANDS = [name for name in commands.names("topk-registry:*") if name != "run"]
NUMBERS = ("int", "float", "integer", "number")
MAY_BE_NEGATIVE = {"--mean"}


def parser_of(command, monkeypatch):
    found = []

    def stop(parser, *_):
        found.append(parser)
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(ArgumentParser, "parse_args", stop)
        with pytest.raises(SystemExit):
            commands.builder(command)([])
    return found[0]


@pytest.mark.parametrize("name", [name for name in COMMANDS if name in CORE])
def test_every_flag_has_a_help_that_stands_by_itself(name, monkeypatch):
    of_another = ("its ", "their ", "those ", "of ", "(", "default", "as in timm")
    actions = parser_of(name, monkeypatch)._actions
    assert not [action.dest for action in actions if not action.help or action.help.startswith(of_another)]


@pytest.mark.parametrize(
    "name", [name for name in COMMANDS if name in CORE and name not in ("train", "validate")]
)  # whose settings have ranges, see flags.py
def test_every_number_that_a_flag_takes_has_a_range(name, monkeypatch):
    actions = parser_of(name, monkeypatch)._actions
    assert not [action.dest for action in actions if action.type in (int, float) and not action.choices]


@pytest.mark.parametrize("name", COMMANDS)
def test_flags_and_help_stay_within_two_screens(name, monkeypatch):
    flags = [action for action in parser_of(name, monkeypatch)._actions if action.option_strings]
    assert len(flags) <= (110 if name == "train" else 25)


@pytest.mark.parametrize("command", COMMANDS)
def test_flags_have_help_and_numbers_a_range(command, monkeypatch, capsys):
    parser = parser_of(command, monkeypatch)
    parse = config.parse_args if command == "train" else parser.parse_args
    assert parser.description
    silent = [action.dest for action in parser._actions if not action.help]
    assert not silent
    taken = []
    for action in parser._actions:
        flag = next((name for name in action.option_strings if name.startswith("--")), None)
        if flag is None or getattr(action.type, "__name__", "") not in NUMBERS:
            continue
        for text in ("nan", "-1e999", "three", *(() if flag in MAY_BE_NEGATIVE else ("-7",))):
            try:
                parse([f"{flag}={text}"])
                taken.append(f"{flag} {text}")
            except SystemExit as ended:
                (line,) = capsys.readouterr().err.splitlines()
                if ended.code != 2 or not any(name in line for name in action.option_strings):
                    taken.append(f"{flag} {text}: {line}")
    assert taken == []


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "train"])  # whose defaults its plan prints
def test_a_default_is_the_one_that_the_help_states(name, monkeypatch):
    wrong = {}
    for action in parser_of(name, monkeypatch)._actions:
        default = action.default if isinstance(action.default, list) else [action.default]
        stated = re.search(r"\(default: ([^)]*)\)", action.help or "")
        is_number = bool(default) and {type(each) for each in default} <= {int, float}
        if is_number and (stated is None or [float(word) for word in stated[1].split()] != default):
            wrong[action.dest] = (default, stated)
    assert wrong == {}


@pytest.mark.parametrize(("name", "hinted"), [("check", True), ("losses", False)])
def test_an_unknown_flag_may_be_an_option_of_the_loss(name, hinted, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        parser_of(name, monkeypatch).parse_args(["ce", "--label-smoothing", "0.1"])
    hint = "; an option of the loss is given as --loss-opt label_smoothing=VALUE"
    assert (hint in capsys.readouterr().err) == hinted
