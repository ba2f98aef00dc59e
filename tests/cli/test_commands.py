"""Commands come in by entry points, and a plug-in's is listed and run as our own are."""

import sys

import pytest

from topk_registry.cli import main as cli
from topk_registry.cli.commands import CORE, commands

SOURCE = '''"""A module of acme's."""
def main(argv):
    """Greet."""
    print("hello", *argv)
    return len(argv)
'''

OURS = [name for name in commands.names("topk-registry:*") if name != "run"]


@pytest.fixture
def acme(site):
    site.module("acme_tools", SOURCE)
    site.distribution("acme-tools", {"greet": "acme_tools:main"}, version="2.5", group=commands.group)
    commands.refresh()
    return site


def shown(capsys):
    assert cli.main(["--help"]) == 0
    return capsys.readouterr().out


def test_a_plugins_command_is_listed_under_its_distribution_and_not_imported(acme, capsys):
    _, _, foreign = shown(capsys).partition("Commands of acme-tools:\n")
    assert foreign.splitlines()[0].split() == ["greet", "Greet."]
    assert "acme_tools" not in sys.modules


def test_it_gets_its_arguments_and_its_status_is_the_command_lines(acme, capsys):
    assert cli.main(["greet", "a", "--b", "c"]) == 3
    assert capsys.readouterr().out == "hello a --b c\n"
    assert cli.main(["acme-tools:greet"]) == 0
    assert capsys.readouterr().out == "hello\n"


def test_one_that_is_not_installed_is_listed_as_broken_and_others_run(acme, capsys):
    acme.distribution("hollow", {"vanish": "hollow_tools:main"}, group=commands.group)
    commands.refresh()
    assert "broken: package 'hollow_tools' is not installed" in shown(capsys)
    assert cli.main(["vanish"]) == 1
    assert "command 'vanish' of hollow 1.0 (hollow_tools:main) is broken" in capsys.readouterr().err
    assert cli.main(["greet"]) == 0


def test_one_that_fails_on_import_prints_the_reason_first(acme, capsys):
    acme.module("acme_tools", "raise OSError('disk full')\n")
    assert cli.main(["greet"]) == 1
    error = capsys.readouterr().err
    reason, place = error.splitlines()
    assert reason.endswith("command 'greet' of acme-tools 2.5 (acme_tools:main) is broken: OSError: disk full")
    assert place.endswith("acme_tools.py:1: raise OSError('disk full')")
    assert "broken: OSError: disk full" in shown(capsys)


def test_two_owners_of_a_name_are_an_error_that_says_how_to_pick_one(acme, capsys):
    acme.distribution("rival-tools", {"greet": "acme_tools:main"}, group=commands.group)
    commands.refresh()
    assert cli.main(["greet"]) == 2
    assert "ask for 'acme-tools:greet' or 'rival-tools:greet'" in capsys.readouterr().err
    assert "acme-tools:greet" in shown(capsys)


def test_a_disabled_command_is_listed_with_the_reason(acme, capsys, monkeypatch):
    monkeypatch.setenv("TOPK_REGISTRY_DISABLE", "acme-tools")
    assert "disabled by TOPK_REGISTRY_DISABLE" in shown(capsys)
    assert cli.main(["greet"]) == 2
    assert "disabled by TOPK_REGISTRY_DISABLE" in capsys.readouterr().err


def test_the_cores_own_commands_can_be_neither_taken_nor_disabled(acme, capsys, monkeypatch):
    acme.distribution("greedy", {"doctor": "acme_tools:main"}, group=commands.group)
    monkeypatch.setenv("TOPK_REGISTRY_PLUGINS", "greedy")
    commands.refresh()
    assert set(CORE) <= set(commands.names())
    assert commands.info("doctor").value == CORE["doctor"]
    assert [info.status for info in commands.infos("export")] == ["disabled"]
    assert cli.main(["greedy:doctor", "x"]) == 1
    assert capsys.readouterr().out == "hello x\n"


def test_every_command_of_ours_has_a_summary_and_a_module():
    for info in map(commands.info, OURS):
        assert info.status in ("available", "loaded"), info
        assert info.summary.endswith("."), info


@pytest.mark.parametrize("name", sorted(CORE))
def test_a_usage_error_is_one_line_that_points_to_help(name, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main([name, "--no-such-flag"])
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{name} --help" in error


@pytest.mark.parametrize("flag", ["--exlude", "--excl"])  # misspelt, and a part of the flag
def test_an_unknown_flag_names_the_closest(capsys, flag):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["losses", flag, "ce"])
    message = f"topk-registry losses: unrecognized arguments: {flag}; did you mean '--exclude'?"
    assert message in capsys.readouterr().err


def test_ctrl_c_while_a_command_is_imported_is_no_traceback(site, capsys):
    site.module("acme_slow", "raise KeyboardInterrupt")
    site.distribution("acme-slow", {"slow": "acme_slow:main"}, version="1", group=commands.group)
    commands.refresh()
    assert cli.main(["slow"]) == 130
    assert capsys.readouterr().err.endswith(": interrupted\n")
