"""The command line over the registry: losses and doctor."""

import re
import subprocess
import sys

import pytest

from topk_registry import create_loss, list_losses, loss_info, refresh_plugins, registry
from topk_registry.cli import doctor
from topk_registry.cli import main as cli
from topk_registry.cli.commands import CORE, commands
from topk_registry.ops import backend
from topk_registry.registry.discovery import installed_version, misspelt_groups


def python(*argv):
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=600)


@pytest.fixture
def fresh(site):
    """A distribution with a loss that the whole process finds."""
    site.module(
        "acme_losses", "class Mine:\n    '''A loss of acme's.'''\n    def __call__(self, logits, target): ...\n"
    )
    site.distribution("acme-losses", {"acme": "acme_losses:Mine"}, version="2.5")
    refresh_plugins()
    return site


def plugins():
    report = doctor.Report()
    doctor._plugins(report)
    return report


def test_losses_are_listed_with_owner_status_and_summary(fresh, capsys):
    assert cli.main(["losses", "ac*", "ce"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["NAME", "FROM", "STATUS", "SUMMARY"]
    assert rows[0].split(maxsplit=4) == ["acme", "acme-losses", "2.5", "available", "A loss of acme's."]
    assert rows[1].split()[:2] == ["ce", "timm"]
    assert "acme_losses" not in sys.modules


def test_one_loss_lists_its_options_with_defaults_and_ranges(fresh, capsys):
    assert cli.main(["losses", "focal"]) == 0
    out = capsys.readouterr().out
    rows = [re.split(r" {2,}", line) for line in out[out.index("OPTION") :].splitlines()]
    assert ["gamma", "2.0", "[0, inf)", "0.5, 1.0, 2.0"] in rows
    assert ["label_smoothing", "0.0", "[0, 1]"] in rows
    assert cli.main(["losses", "ce"]) == 0
    assert cli.main(["losses", "acme"]) == 0
    assert capsys.readouterr().out.endswith("A loss of acme's.\n\nThe signature of this loss names no options.\n")


@pytest.mark.parametrize(
    "source", ["class Mine:\n    takes_k_hot: bool = True\n", "def Mine(): return print\nMine.takes_k_hot = True\n"]
)
def test_a_loss_says_that_it_takes_k_hot_targets(fresh, source):
    fresh.module("acme_losses", source)
    refresh_plugins()
    names = ("acme", "ce", "zlpr", "bce", "focal", "ksubset_nll")
    assert [name for name in names if registry.takes_k_hot(name)] == ["acme", "zlpr", "bce", "ksubset_nll"]


def test_a_disabled_or_broken_loss_is_listed_with_the_reason(fresh, capsys, monkeypatch):
    fresh.distribution("hollow", {"acme_2": "no_such_module:Mine"})
    refresh_plugins()
    assert cli.main(["losses", "acm*", "focal"]) == 0
    assert "'no_such_module' is not installed" in capsys.readouterr().out
    monkeypatch.setenv("TOPK_REGISTRY_DISABLE", "acme")
    assert cli.main(["losses", "acm*"]) == 0
    assert "disabled by TOPK_REGISTRY_DISABLE" in capsys.readouterr().out


def test_a_broken_loss_is_the_reason_and_the_lines_that_raised_it(fresh, capsys):
    fresh.module("acme_losses", "import json\n\n\njson.loads('{')\n")
    assert cli.main(["losses", "acme"]) == 1
    reason, first, last = capsys.readouterr().err.splitlines()
    assert "loss 'acme' of acme-losses 2.5 (acme_losses:Mine) is broken: JSONDecodeError: Expecting" in reason
    assert re.fullmatch(r"  at \S+acme_losses\.py:4: json\.loads\('{'\)", first)
    assert re.fullmatch(r"  at \S+decoder\.py:\d+: .*", last)


def test_an_unknown_name_is_one_line(fresh, capsys):
    assert cli.main(["losses", "acmee"]) == 2
    error = capsys.readouterr().err
    assert "the closest are acme" in error
    assert "Traceback" not in error
    with pytest.raises(SystemExit, match="2"):
        cli.main(["losses", "xyz*"])
    assert "no loss matches xyz*" in capsys.readouterr().err


def test_a_hidden_loss_is_listed_by_its_full_name(fresh, capsys):
    fresh.distribution("rival-losses", {"topk_hinge": "acme_losses:Mine", "ce": "gone_losses:Mine"})
    refresh_plugins()
    assert loss_info("topk_hinge").distribution == "topk-registry"
    assert create_loss("topk_hinge", k=3).k == 3
    assert "rival-losses:topk_hinge" not in list_losses()
    assert type(create_loss("rival-losses:topk_hinge")).__name__ == "Mine"
    assert cli.main(["losses"]) == 0
    rows = {row.split()[0]: row for row in capsys.readouterr().out.splitlines()}
    assert "available" in rows["rival-losses:topk_hinge"]
    assert "broken" in rows["rival-losses:ce"]
    assert "rival-losses:topk_hinge shares its name with another loss" in plugins().notes


def test_help_version_and_wrong_commands(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/timm"])
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: timm COMMAND")
    assert all(name in out for name in CORE)
    assert cli.main(["--version"]) == 0
    versions = [f"{name} {installed_version(name)}" for name in ("topk-registry", "timm")]
    assert capsys.readouterr().out == ", ".join(versions) + "\n"
    assert cli.main(["loses"]) == 2
    assert "the closest are losses" in capsys.readouterr().err


@pytest.mark.parametrize(("argument", "word"), [("losses", "topk_hinge"), ("--help", "export")])
def test_listing_imports_the_standard_library_only(argument, word):
    code = (
        "import sys; before = set(sys.modules); import topk_registry.cli.main as cli\n"
        f"assert cli.main([{argument!r}]) == 0\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names\n"
        "raise SystemExit(f'imported {new}' if new - {'topk_registry'} else 0)\n"
    )
    result = python("-c", code)
    assert result.returncode == 0, result.stderr
    assert word in result.stdout


def test_a_closed_pipe_is_no_traceback():
    command = f"'{sys.executable}' -m topk_registry losses | head -n 1"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=600)
    assert result.stdout.startswith("NAME")
    assert result.stderr == ""


@pytest.mark.slow
def test_doctor_reports_versions_backends_and_a_broken_plugin(fresh, capsys, monkeypatch):
    monkeypatch.setenv("TOPK_REGISTRY_BACKEND", "torch")
    monkeypatch.setattr(backend, "_environment", {})
    fresh.module("acme_losses", "raise OSError('disk full')\nMine = None\n")
    (fresh.distribution("nameless", {}) / "METADATA").write_text("\n")
    assert cli.main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    facts = dict(line.split("  ", 1) for line in lines if "  " in line)
    assert facts["torch"].strip() == installed_version("torch")
    assert facts["ksubset on cpu"].strip().startswith("torch: chosen")
    assert "timm command" in facts
    assert [
        line for line in lines if line.startswith("problem: loss 'acme' of acme-losses 2.5") and "disk full" in line
    ]


def test_doctor_goes_on_if_one_part_fails(monkeypatch):
    def _packages(report):
        raise RuntimeError("the driver is gone")

    for name in ("_devices", "_plugins"):
        monkeypatch.setattr(doctor, name, lambda report: None)
        getattr(doctor, name).__name__ = name
    monkeypatch.setattr(doctor, "_packages", _packages)
    report = doctor.examine()
    assert not [note for note in report.notes if note.startswith("without ")]  # torch is installed
    assert "packages: RuntimeError: the driver is gone" in report.problems
    assert "timm command" in report.facts


def test_doctor_without_problems_is_status_0(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda: doctor.Report({"torch": "2"}, ["a thing to know"]))
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out.split("\n") == ["torch  2", "", "note: a thing to know", "", "no problems found", ""]


@pytest.mark.parametrize("name", ["acme-tools", "topk-registry"])
def test_a_package_that_a_plug_in_needs_is_a_problem_and_one_of_an_extra_of_ours_a_note(fresh, name):
    fresh.module("acme_tools", "import a_package_of_an_extra\ndef main(argv): ...\n")
    fresh.distribution(name, {"greet": "acme_tools:main"}, group=commands.group)
    commands.refresh()
    report = plugins()
    found, others = (report.notes, report.problems)[:: 1 if name == "topk-registry" else -1]
    (message,) = [message for message in found if "greet" in message]
    assert re.search(f"'greet' of {name} 1.0 .acme_tools:main. is .*No module named 'a_package_of_an_extra'", message)
    assert ("`pip check` lists" in message) == (found is report.problems)
    assert not [message for message in others if "greet" in message]


@pytest.mark.parametrize(
    ("group", "value", "words"),
    [
        ("topk_registry.loss", "acme_losses:Mine", "[topk_registry.loss]; the groups are topk_registry.losses"),
        ("topk-registry.commands", "acme_losses:Mine", "[topk-registry.commands]"),
        ("topk_registry.models", "acme_losses:Mine", "[topk_registry.models]"),
        ("topk_registry.losses", "acme_loses:Mine", "No module named 'acme_loses'"),
        ("topk_registry.commands", "acme_losses:Mien", "has no attribute 'Mien'"),
    ],
)
def test_doctor_finds_a_misspelt_entry_point(fresh, group, value, words):
    fresh.distribution("acme-extra", {"extra": value}, group=group)
    refresh_plugins()
    commands.refresh()
    (problem,) = [line for line in plugins().problems if "acme-extra" in line]
    assert words in problem


def test_groups_of_others_are_not_checked(fresh):
    fresh.distribution("acme-extra", {"extra": "acme_losses:Mine"}, group="pytest11")
    assert not [message for message, _ in misspelt_groups() if "acme" in message]


@pytest.mark.parametrize(
    ("module", "problems"), [("topk_registry.cli.main", 0), ("timm.cli", 1), (None, 0)], ids=["ours", "another", "none"]
)
def test_the_timm_command_on_path_is_named(tmp_path, monkeypatch, module, problems):
    monkeypatch.setenv("PATH", str(tmp_path))
    if module:
        (tmp_path / "timm").write_text(f"#!/usr/bin/env python\nimport sys\nfrom {module} import main\n")
        (tmp_path / "timm").chmod(0o755)
    report = doctor.Report()
    doctor._timm_command(report)
    assert (module or "not on PATH") in report.facts["timm command"]
    assert len(report.problems) == problems


def test_two_wheels_of_onnxruntime_are_a_problem(site):
    for name in ("onnxruntime", "onnxruntime-gpu"):
        site.distribution(name, {}, version="9.9")
    report = doctor.Report()
    doctor._packages(report)
    assert report.facts["onnxruntime-gpu"] == "9.9"
    assert any("overwrite each other" in problem for problem in report.problems)
