"""The command line over the registry."""

import json
import subprocess
import sys

import pytest

from topk_registry import create_loss, loss_info, refresh_plugins, registry
from topk_registry.cli import doctor
from topk_registry.cli import main as cli
from topk_registry.cli.commands import CORE, commands
from topk_registry.registry import environment
from topk_registry.registry.discovery import misspelt_groups


def python(*argv, **options):
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=600, **options)


@pytest.fixture
def fresh(site):
    """The registry of losses reads the test's distributions, here as everywhere."""
    site.module(
        "acme_losses", "class Mine:\n    '''A loss of acme's.'''\n    def __call__(self, logits, target): ...\n"
    )
    site.distribution("acme-losses", {"acme": "acme_losses:Mine"}, version="2.5")
    refresh_plugins()
    return site


def test_losses_are_listed_with_owner_status_and_summary(fresh, capsys):
    assert cli.main(["losses", "ac*", "ce"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["NAME", "FROM", "STATUS", "LABELS", "SUMMARY"]
    assert rows[0].split(maxsplit=5) == ["acme", "acme-losses", "2.5", "available", "one", "A loss of acme's."]
    assert rows[1].split()[:2] == ["ce", "timm"]


@pytest.mark.parametrize("columns", [80, 100, 200])
def test_a_terminal_shows_whole_summaries(fresh, capsys, monkeypatch, columns):
    assert cli.main(["losses"]) == 0
    piped = capsys.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    assert cli.main(["losses"]) == 0
    shown = capsys.readouterr().out
    assert shown.split() == piped.split()
    assert max(map(len, shown.splitlines())) <= columns
    assert len(piped.splitlines()) <= len(shown.splitlines())


def test_a_loss_without_a_summary_is_listed(fresh, capsys, monkeypatch):
    fresh.module("acme_losses", "def Mine(): ...\n")
    for terminal in (False, True):
        monkeypatch.setattr("sys.stdout.isatty", lambda terminal=terminal: terminal)
        assert cli.main(["losses", "acme"]) == 0
        assert "acme  acme-losses 2.5  available" in capsys.readouterr().out


def test_json_holds_everything_that_is_known(fresh, capsys):
    assert cli.main(["losses", "acme", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry == {
        "name": "acme",
        "distribution": "acme-losses",
        "version": "2.5",
        "value": "acme_losses:Mine",
        "status": "available",
        "error": "",
        "summary": "A loss of acme's.",
        "takes_k_hot": False,
    }


@pytest.mark.parametrize(
    "source",
    [
        "class Mine:\n    takes_k_hot = True\n    def __call__(self, logits, target): ...\n",
        "class Mine:\n    takes_k_hot: bool = True\n    def __call__(self, logits, target): ...\n",
        "def Mine(): return print\nMine.takes_k_hot = True\n",
    ],
    ids=["class", "annotated", "function"],
)
def test_a_loss_that_takes_k_hot_targets_says_so_in_its_source(fresh, capsys, source):
    fresh.module("acme_losses", source)
    refresh_plugins()
    assert cli.main(["losses", "acme", "ce", "zlpr", "bce", "--k-hot"]) == 0
    names = {row.split()[0]: row for row in capsys.readouterr().out.splitlines()[1:]}
    assert set(names) == {"acme", "bce", "zlpr"}
    assert "one, several" in names["acme"]
    assert "one" not in names["zlpr"].split("several")[0]
    assert "acme_losses" not in sys.modules
    registry.get_loss_builder("acme")
    assert registry.takes_k_hot("acme")  # as the imported factory says


def test_no_loss_of_k_hot_targets(fresh, capsys):
    assert cli.main(["losses", "acme", "--k-hot"]) == 1
    assert "no loss matches" in capsys.readouterr().err


def test_disabled_losses_are_listed_with_the_reason(fresh, capsys, monkeypatch):
    monkeypatch.setenv("TOPK_REGISTRY_DISABLE", "acme")
    assert cli.main(["losses", "acme"]) == 0
    assert "disabled by TOPK_REGISTRY_DISABLE" in capsys.readouterr().out


def test_no_match_is_status_1_with_a_hint(fresh, capsys):
    assert cli.main(["losses", "acm"]) == 1
    assert "'*acm*' matches inside names" in capsys.readouterr().err
    assert cli.main(["losses", "acme", "--exclude", "a*"]) == 1


def test_why_tells_of_a_loss_that_works(fresh, capsys):
    assert cli.main(["losses", "--why", "acme"]) == 0
    assert "acme is acme_losses:Mine of acme-losses 2.5; it imports and builds" in capsys.readouterr().out


def test_why_tells_what_a_loss_needs(fresh, capsys):
    fresh.module("acme_losses", "def Mine(class_counts): ...\n")
    assert cli.main(["losses", "--why", "acme"]) == 0
    assert "loss 'acme' needs class_counts" in capsys.readouterr().out


def test_why_prints_the_full_error_of_a_factory_that_complains(fresh, capsys):
    fresh.module("acme_losses", "def Mine():\n    return None + 1\n")
    assert cli.main(["losses", "--why", "acme"]) == 1
    out, error = capsys.readouterr()
    assert "return None + 1" in error
    assert "acme is acme_losses:Mine of acme-losses 2.5; it imports, and does not build without options: Type" in out


@pytest.mark.parametrize("source", ["def Mine():\n    raise OSError('disk full')\n", "raise OSError('disk full')\n"])
def test_why_prints_the_full_error(fresh, capsys, source):
    fresh.module("acme_losses", source)
    assert cli.main(["losses", "--why", "acme"]) == 1
    error = capsys.readouterr().err
    assert "raise OSError('disk full')" in error
    assert "direct cause" in error
    assert "'acme' of acme-losses 2.5" in error


def test_an_unknown_name_is_one_line_without_a_traceback(fresh, capsys):
    assert cli.main(["losses", "--why", "acmee"]) == 1
    error = capsys.readouterr().err
    assert "the closest are acme" in error
    assert "Traceback" not in error


def test_help_and_version_and_wrong_commands(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/timm"])
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: timm COMMAND")
    assert all(name in out for name in CORE)
    assert cli.main(["--version"]) == 0
    versions = [f"{name} {environment.installed_version(name)}" for name in ("topk-registry", "timm")]
    assert capsys.readouterr().out == ", ".join(versions) + "\n"
    assert cli.main(["loses"]) == 2
    assert "no command is called 'loses'; the closest are losses" in capsys.readouterr().err


@pytest.mark.parametrize("argument", ["losses", "--help"])
def test_listing_imports_neither_torch_nor_a_plugin(argument):
    code = (
        "import sys, topk_registry.cli.main as cli\n"
        f"assert cli.main([{argument!r}]) == 0\n"
        "heavy = {'torch', 'timm', 'numpy', 'topk_plugins', 'topk_export', 'topk_studies'} & set(sys.modules)\n"
        "raise SystemExit(f'imported {heavy}' if heavy else 0)\n"
    )
    result = python("-c", code)
    assert result.returncode == 0, result.stderr
    assert {"losses": "topk_hinge", "--help": "serve"}[argument] in result.stdout


def test_importing_the_package_imports_nothing_heavy():
    code = (
        "import sys; before = set(sys.modules); import topk_registry, topk_export\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "outside = new - sys.stdlib_module_names - {'topk_registry', 'topk_export'}\n"
        "raise SystemExit(f'imported {outside}' if outside else 0)"
    )
    assert python("-c", code).returncode == 0


def test_a_closed_pipe_is_no_traceback():
    command = f"'{sys.executable}' -m topk_registry losses --json | head -n 1"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=600)
    assert result.stdout == "[\n"
    assert result.stderr == ""


@pytest.mark.slow
def test_doctor_reports_versions_and_a_broken_plugin(fresh, capsys):
    fresh.module("acme_losses", "raise OSError('disk full')\nMine = None\n")
    assert cli.main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["facts"]["torch"] == environment.installed_version("torch")
    assert [line for line in report["problems"] if "'acme' of acme-losses 2.5" in line and "disk full" in line]


@pytest.mark.parametrize(("wanted", "said"), [("torch", "torch: chosen by TOPK_REGISTRY_BACKEND"), ("auto", "numba: ")])
def test_doctor_says_which_backend_serves_and_why(monkeypatch, wanted, said):
    monkeypatch.setenv("TOPK_REGISTRY_BACKEND", wanted)
    report = doctor.Report()
    doctor._backends(report)
    assert set(report.facts) >= {"ksubset on cpu", "perturbed on cpu"}
    assert report.facts["ksubset on cpu"].startswith(said)


def test_doctor_notes_a_command_that_cannot_run_here(fresh):
    fresh.module("acme_tools", "import a_package_of_an_extra\ndef main(argv): ...\n")
    fresh.distribution("acme-tools", {"greet": "acme_tools:main"}, group=commands.group)
    commands.refresh()
    report = doctor.Report()
    doctor._plugins(report)
    assert [note for note in report.notes if "'greet' of acme-tools 1.0" in note and "a_package_of_an_extra" in note]
    assert not [problem for problem in report.problems if "greet" in problem]


@pytest.mark.parametrize(
    ("group", "value", "said"),
    [
        ("topk_registry.loss", "acme_losses:Mine", "[topk_registry.loss]; did you mean [topk_registry.losses]?"),
        ("topk-registry.commands", "acme_losses:Mine", "did you mean [topk_registry.commands]?"),
        ("topk_registry.models", "acme_losses:Mine", "nobody reads the entry points of [topk_registry.models]; "),
        ("topk_registry.losses", "acme_loses:Mine", "No module named 'acme_loses'; did you mean 'acme_losses'?"),
        ("topk_registry.loggers", "acme_losses:Mien", "no attribute 'Mien'; did you mean 'Mine'?"),
        ("topk_registry.commands", "acme_losses:Mien", "no attribute 'Mien'; did you mean 'Mine'?"),
    ],
)  # fmt: skip
def test_doctor_finds_a_misspelt_entry_point(fresh, group, value, said):
    fresh.distribution("acme-extra", {"extra": value}, group=group)
    refresh_plugins()
    commands.refresh()
    report = doctor.Report()
    doctor._plugins(report)
    (problem,) = [line for line in report.problems if "acme-extra" in line]
    assert said in problem


def test_doctor_leaves_the_groups_of_others_alone(fresh):
    fresh.distribution("acme-extra", {"extra": "acme_losses:Mine"}, group="pytest11")
    assert not [line for line in misspelt_groups(["topk_registry.losses"]) if "acme" in line]


def test_a_name_of_ours_stays_ours_and_doctor_tells_of_the_other(fresh, capsys):
    fresh.distribution("rival-losses", {"topk_hinge": "acme_losses:Mine", "ce": "acme_losses:Mine"})
    refresh_plugins()
    assert loss_info("topk_hinge").distribution == "topk-registry"
    assert create_loss("topk_hinge", k=3).k == 3
    assert type(create_loss("rival-losses:topk_hinge")).__name__ == "Mine"
    report = doctor.Report()
    doctor._plugins(report)
    assert (
        "loss 'topk_hinge' is topk-registry's; the one of rival-losses 1.0 is asked for as 'rival-losses:topk_hinge'"
        in report.notes
    )
    assert [note for note in report.notes if note.startswith("loss 'ce' is timm's; ")]
    assert not [line for line in report.problems if "rival" in line]


def test_a_syntax_error_shows_in_the_list(fresh, capsys):
    fresh.module("acme_losses", "import math\ndef Mine(: pass\n")
    assert cli.main(["losses", "acme"]) == 0
    row = capsys.readouterr().out.splitlines()[1]
    assert "broken" in row
    assert "(acme_losses, line 2)" in row


def test_doctor_tells_of_wildcards_that_match_nothing(fresh, monkeypatch):
    monkeypatch.setenv("TOPK_REGISTRY_DISABLE", "acme-losses, acme-lossse")
    monkeypatch.setenv("TOPK_REGISTRY_PLUGINS", "topk_*, globex:*")
    report = doctor.Report()
    doctor._plugins(report)
    assert [note for note in report.notes if "matches no" in note] == [
        "TOPK_REGISTRY_PLUGINS: 'globex:*' matches no plug-in here",
        "TOPK_REGISTRY_DISABLE: 'acme-lossse' matches no plug-in here",
    ]


@pytest.mark.slow
def test_doctor_survives_metadata_that_cannot_be_read(fresh, capsys):
    garbled = fresh.distribution("garbled", {}) / "entry_points.txt"
    garbled.write_bytes(b"[console_scripts]\n\xff\xfe = a:b\n")
    (fresh.distribution("nameless", {}) / "METADATA").write_text("\n")
    cli.main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert "timm command" in report["facts"]
    assert len([line for line in report["problems"] if "garbled" in line]) == 1


@pytest.mark.slow
def test_doctor_goes_on_where_one_look_fails(capsys, monkeypatch):
    def _gpu(report):
        raise RuntimeError("the driver is gone")

    monkeypatch.setattr(doctor, "_gpu", _gpu)
    assert cli.main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert "looking at gpu failed: RuntimeError: the driver is gone" in report["problems"]
    assert "plug-ins" in report["facts"]


def test_doctor_without_problems_is_status_0(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda: doctor.Report({"torch": "2"}, ["a thing to know"]))
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out.split("\n") == ["torch  2", "", "note: a thing to know", "", "no problems found", ""]


def test_two_wheels_of_onnxruntime_are_a_problem(site):
    for name in ("onnxruntime", "onnxruntime-gpu"):
        record = site.distribution(name, {}, version="9.9") / "RECORD"
        record.write_text("onnxruntime/__init__.py,sha256=0,1\n")
    site.distribution("onnxruntime-extensions", {}, version="9.9")
    report = doctor.Report()
    doctor._onnxruntime(report)
    assert "onnxruntime 9.9" in report.facts["onnxruntime"]
    assert "onnxruntime-gpu 9.9" in report.facts["onnxruntime"]
    assert "extensions" not in report.facts["onnxruntime"]
    assert "overwrite each other's files" in report.problems[0]


def test_the_distribution_with_the_same_files_is_a_problem(site, capsys):
    told = "topk-predict 9.9 and topk-registry install the same files"
    assert not any("topk-predict" in problem for problem in doctor.examine().problems)
    site.distribution("topk-predict", {}, version="9.9")
    assert any(problem.startswith(told) for problem in doctor.examine().problems)


@pytest.fixture
def executables(tmp_path, monkeypatch):
    def write(folder, module):
        path = tmp_path / folder / "timm"
        path.parent.mkdir()
        path.write_text(f"#!/usr/bin/env python\nimport sys\nfrom {module} import main\nsys.exit(main())\n")
        path.chmod(0o755)
        return path

    monkeypatch.setenv("PATH", f"{tmp_path / 'first'}:{tmp_path / 'second'}")
    return write


def test_the_timm_command_that_wins_is_named(executables):
    first, _ = executables("first", "topk_registry.cli.main"), executables("second", "timm.cli")
    report = doctor.Report()
    doctor._commands(report)
    assert report.facts["timm command"] == f"{first} of topk-registry (topk_registry.cli.main)"
    assert not report.problems


def test_a_timm_command_that_is_not_ours_is_a_problem(executables):
    executables("first", "timm.cli")
    executables("second", "topk_registry.cli.main")
    report = doctor.Report()
    doctor._commands(report)
    assert "of another environment (timm.cli)" in report.facts["timm command"]
    assert "is not ours" in report.problems[0]


def test_two_distributions_that_install_timm_are_a_problem(site, executables):
    executables("first", "timm.cli")
    site.distribution("rival", {"timm": "timm.cli:main"}, group="console_scripts")
    report = doctor.Report()
    doctor._commands(report)
    assert "of rival (timm.cli)" in report.facts["timm command"]
    assert "rival and topk-registry each install a timm command" in report.problems[0]


def test_no_timm_command_is_only_worth_knowing(executables):
    report = doctor.Report()
    doctor._commands(report)
    assert report.facts["timm command"] == "not on PATH"
    assert not report.problems
    assert report.notes
