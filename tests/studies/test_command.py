"""``topk-registry study``, as it is typed."""

import csv
import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

from topk_registry import refresh_plugins
from topk_registry.cli.main import main
from topk_studies import command as study
from topk_studies.engine.catalogue import STUDIES, load_study
from topk_studies.engine.store import Store
from topk_studies.engine.study import Options
from topk_studies.engine.tuning import run_of
from topk_studies.report.output import write_data

from .conftest import TINY_FLAGS, trained

HELD = """
import os, signal, time
from pathlib import Path
from topk_registry import ClassificationLoss
from topk_registry.train.engine.signals import StopRequest

def asked_to_stop():
    request = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
    return isinstance(request, StopRequest) and bool(request)

class Held(ClassificationLoss):
    def per_class(self, logits):
        folder = Path(os.environ["HELD_FOLDER"])
        while (folder / "held").exists() and list(folder.glob("runs/train/*.json")) and not asked_to_stop():
            time.sleep(0.01)
        return -logits.log_softmax(-1)
"""
THEIRS = """
from topk_registry import ClassificationLoss

class Brier(ClassificationLoss):
    def per_class(self, logits):
        p = logits.softmax(-1)
        return p.square().sum(-1, keepdim=True) - 2 * p + 1
"""


def test_the_list(capsys):
    assert main(["study", "--list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in STUDIES)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nois"], "did you mean noise"),
        ([], "name a study"),
        (["noise", "--budget", "large"], "invalid choice"),
        (["noise", "--max-seeds", "41"], "2 to 40, got 41"),
        (["noise", "--max-seeds", "8", "--seeds", "1"], "give one of the two"),
    ],
)
def test_a_wrong_command_line_is_told_what_there_is(argv, message, capsys):
    with pytest.raises(SystemExit) as error:
        main(["study", *argv])
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_an_unknown_loss_is_an_error_before_anything_runs(tmp_path, capsys):
    assert main(["study", "noise", "--losses", "ce", "smoth_topk_svm", "--output", str(tmp_path / "out")]) == 1
    assert "smooth_topk_svm" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def asked(monkeypatch, *argv):
    """The options that the study would be run with."""
    found = []
    monkeypatch.setattr(study, "run_study", lambda module, options, *args, **kwargs: found.append(options) or [])
    monkeypatch.setattr(study, "_report", lambda names, store: 0)
    assert main(["study", *argv, "--device", "cpu"]) == 0
    return found[0]


@pytest.mark.parametrize("k", ["loss_opt=k=2", "loss-opt={'k': 2}"])
def test_options_of_the_loss_are_given_as_on_the_command_line(monkeypatch, tmp_path, k):
    argv = ["compare", "--losses", "ce", "smooth_topk_svm", "--output", str(tmp_path), "--folds", "5"]
    options = asked(monkeypatch, *argv, "--rates", "1e-4", "1e-2", "--flags", k, "model_kwargs=width=4 norm=True")
    assert options.flags == {"loss_opt": {"k": 2}, "model_kwargs": {"width": 4, "norm": True}}
    assert (options.folds, options.rates) == (5, (1e-4, 1e-2))
    # only losses that have a k are given one
    by_loss = {loss: run_of(options, loss=loss, seed=0)["flags"].get("loss_opt") for loss in options.losses}
    assert by_loss == {"ce": None, "smooth_topk_svm": {"k": 2}}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["compare", "--losses", "ce", "focal", "--flags", "loss_opt=k=2"], "none of ce, focal takes the option 'k'"),
        (["compare", "--flags", "loss_opt=k"], "--flags loss_opt takes key=value, got 'k'"),
        (["compare", "--flags", "eval_metric=loss"], "ranks by an accuracy"),
        (["compare", "--folds", "5", "--val-split", "0.1"], "leave --val-split out"),
        (["compare", "--rates", "1", "0.1"], "a lower and a higher rate"),
        (["noise", "--folds", "5"], "--rates and --folds are of study compare"),
    ],
)
def test_options_without_a_use_are_told_before_anything_runs(argv, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        main(["study", *argv, "--output", str(tmp_path / "out")])
    assert error.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_no_column_of_any_table_is_empty(tmp_path):
    """One loss alone has none to be less or worse than, and data without a posterior no excess risk."""
    options = Options(losses=("ce",), seeds=(0,), flags={"dataset": "topk/hierarchy"})
    records: list = []
    while len(found := load_study("compare").configurations(options, records)) > len(records):
        records = [trained(one, [{"top5": 40.0 + one["flags"]["lr"], "test_top5": 40.0}]) for one in found]
    store = Store(tmp_path)
    for record in records:
        store.put(record)
    store.write_study("compare", records, {"command": ""})
    (section,) = write_data(store)
    for table in section.findings.tables:
        assert all(any(row[i] not in (None, "") for row in table.rows) for i in range(len(table.columns)))
        assert {"excess risk", "less the best", "than the best"}.isdisjoint(table.columns)
    with open(tmp_path / "runs.csv") as file:
        rows = list(csv.DictReader(file))
    assert all(any(row[name] for row in rows) for name in rows[0])


def test_report_only_of_an_empty_folder(tmp_path, capsys):
    assert main(["study", "noise", "--report-only", "--output", str(tmp_path)]) == 1
    assert "no runs of noise" in capsys.readouterr().err


@pytest.mark.slow
def test_a_third_partys_loss_from_the_command_to_the_report(site, tmp_path, monkeypatch, capsys):
    site.module("brier_loss", THEIRS)
    site.distribution("brier-loss", {"brier": "brier_loss:Brier"})
    refresh_plugins()
    monkeypatch.setenv("PYTHONPATH", str(site.root))
    argv = ["study", "encouraging", "--losses", "ce", "brier", *TINY_FLAGS, "--output", str(tmp_path), "--jobs", "2"]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "8 of 8 runs to do, 0 are cached" in out
    assert "Accuracy with and without a bonus" in out
    with open(tmp_path / "runs.csv") as file:
        rows = list(csv.DictReader(file))
    assert sorted({row["flags.loss"] for row in rows}) == ["brier", "ce"]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [(section["study"], section["runs"], section["failed"]) for section in summary] == [("encouraging", 8, 0)]
    assert summary[0]["command"].startswith("topk-registry study encouraging --losses ce brier")
    assert "brier" in (tmp_path / "report.html").read_text()
    # the table says what the records say
    table = summary[0]["tables"][0]
    for row in table["rows"]:
        runs = [
            r for r in json.loads((tmp_path / "runs.json").read_text()) if r["configuration"]["flags"]["loss"] == row[0]
        ]
        best = max(runs, key=lambda r: r["result"]["history"][0]["top1"])["result"]["history"][0]
        assert row[1]["mean"] == best["test_top1"]

    assert main(argv) == 0  # nothing is run again
    assert "runs to do" not in capsys.readouterr().out
    assert main(["study", "encouraging", "--report-only", "--output", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "summary.json").read_text()) == summary


@pytest.mark.slow
def test_a_run_that_fails_is_shown_and_the_rest_is_reported(site, tmp_path, monkeypatch, capsys):
    site.module("bad_loss", "def build():\n    return lambda logits, target: logits.sum() / 0\n")
    site.distribution("bad-loss", {"bad": "bad_loss:build"})
    refresh_plugins()
    monkeypatch.setenv("PYTHONPATH", str(site.root))
    assert main(["study", "encouraging", "--losses", "ce", "bad", *TINY_FLAGS, "--output", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert out.count("FAILED") == 4
    assert "4 runs failed" in out
    (section,) = json.loads((tmp_path / "summary.json").read_text())
    assert (section["runs"], section["failed"]) == (4, 4)


@pytest.mark.slow
def test_an_interrupt_keeps_what_is_done_and_says_how_to_go_on(site, tmp_path, monkeypatch, capsys):
    """The second run waits for the interrupt, however late it comes."""
    site.module("held_loss", HELD)
    site.distribution("held-loss", {"held": "held_loss:Held"})
    refresh_plugins()
    monkeypatch.setenv("PYTHONPATH", str(site.root))
    monkeypatch.setenv("HELD_FOLDER", str(tmp_path))
    (tmp_path / "held").touch()
    argv = [sys.executable, "-m", "topk_registry", "study", "encouraging", "--losses", "held", *TINY_FLAGS]
    argv += ["--output", str(tmp_path)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("[1/4]"):
            workers = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGINT)
            break
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert "Go on with\n  topk-registry study encouraging --losses held" in err
    assert len(list(tmp_path.glob("runs/train/*.json"))) == 1
    assert workers
    assert not psutil.wait_procs(workers, timeout=300)[1], "workers end with their command"
    (tmp_path / "held").unlink()
    assert main(argv[3:]) == 0
    assert "3 of 4 runs to do, 1 are cached" in capsys.readouterr().out


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_either_signal_stops_a_command_in_the_background(tmp_path, monkeypatch, capsys, signum):
    monkeypatch.setattr(study, "run_study", lambda *args, **kwargs: os.kill(os.getpid(), signum))
    before = signal.signal(signum, signal.SIG_IGN)  # as a shell leaves it for `command &`
    try:
        assert main(["study", "noise", "--output", str(tmp_path)]) == 130
        assert signal.getsignal(signum) is signal.SIG_IGN
    finally:
        signal.signal(signum, before)
    assert "Go on with" in capsys.readouterr().err
