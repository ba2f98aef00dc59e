"""Several commands over one folder: no run is done twice, none is lost with the process that did it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from topk_studies.engine import claims
from topk_studies.engine.claims import Watch, acquire, own_folder
from topk_studies.engine.runner import run_study
from topk_studies.engine.study import Options

from .conftest import CONFIGURATION, QUIET, RECORD

COMMAND = """
import json, sys
from topk_studies.engine import claims, runner
from topk_studies.engine.store import Store
from topk_studies.engine.study import Options
import stub_study

if __name__ == "__main__":
    runner.POLL = runner.TICK = 0.05
    stub_study.COUNT = int(sys.argv[2])
    options = Options(flags=json.loads(sys.argv[3]))
    records = runner.run_study(stub_study, options, Store(sys.argv[1]), jobs=int(sys.argv[4]))
    for record in records:
        print(record.error, end="", file=sys.stderr)
    print(json.dumps([record.result.get("y") for record in records]))
"""


@pytest.fixture
def command(stub, store, tmp_path):
    """Start the stub study over the test's folder in a process of its own."""
    script = tmp_path / "command.py"
    script.write_text(COMMAND)
    started = []

    def start(count=4, plans=None, jobs=1):
        argv = [sys.executable, str(script), str(store.root), str(count), json.dumps(plans or {}), str(jobs)]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def squares(process):
    """The results that a command printed last."""
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    print(err)  # of failed runs, which a failed test shows
    return json.loads(out.splitlines()[-1])


def until(condition):
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.slow
def test_commands_that_race_over_a_folder_share_its_runs(stub, command):
    commands = [command(count=12, plans={str(x): "meet" for x in range(12)}, jobs=2) for _ in range(3)]
    for process in commands:
        assert squares(process) == [*(x * x for x in range(12)), 110**2]
    assert sorted(x for x, _ in stub.runs()) == [*range(12), 110]  # each once, the second stage's too
    assert len(stub.processes()) > 2  # more than one command worked


@pytest.mark.slow
def test_a_run_that_another_command_does_comes_last(stub, store, command):
    other = command(count=1, plans={"0": "held"})
    until(lambda: stub.runs())
    said = []

    def say(line):
        said.append(line)
        if "are being done by another command" in line:
            stub.go()

    records = run_study(stub.study, Options(flags={"0": "held"}), store, say=say)
    assert [record.configuration["x"] for record in records] == [0, 1, 2, 3, 30]
    assert any("by another command" in line and "x=0" in line for line in said)
    assert squares(other) == [0]
    assert sorted(stub.runs()) == [(0, "held"), *((x, "square") for x in (0, 1, 2, 3, 30))]


@pytest.mark.parametrize("victim", ["command", "worker"])
def test_a_run_whose_process_is_killed_is_taken_over_at_once(stub, store, command, victim, monkeypatch):
    monkeypatch.setattr(claims, "LEASE", 1200.0)  # of the process that takes over
    plans = {"1": "sleep-once"}
    first = command(count=3, plans=plans)
    until(lambda: (1, "sleep-once") in stub.runs())
    worker = int(stub.log.read_text().splitlines()[-1].split()[0])
    os.kill(first.pid if victim == "command" else worker, signal.SIGKILL)
    if victim == "command":
        first.wait()
        until(lambda: not _alive(worker))  # the workers of a command that was killed end too
    else:
        assert squares(first) == [0, None, 4]  # and the command goes on
    began = time.monotonic()
    records = run_study(stub.study, Options(flags=plans), store, **QUIET)
    assert time.monotonic() - began < claims.LEASE / 2
    assert [record.result.get("y") for record in records] == [0, 1, 4, 9, 900]  # it resumed from the killed run's work


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_failure_never_replaces_a_finished_run(store):
    from dataclasses import replace

    failure = replace(RECORD, result={}, error="it broke")
    store.put(failure)
    assert store.get("train", 1, CONFIGURATION) == failure
    store.put(RECORD)
    assert store.get("train", 1, CONFIGURATION) == RECORD
    store.put(failure)
    assert store.get("train", 1, CONFIGURATION) == RECORD
    store.write_study("noise", [failure], {})
    assert store.read_study("noise")[0] == [RECORD]


def test_one_of_many_threads_gets_a_claim(tmp_path):
    won = []
    gate = threading.Barrier(16)

    def race():
        gate.wait()
        claim = acquire(tmp_path / "run", 0)
        if claim is not None:
            won.append(claim)

    threads = [threading.Thread(target=race) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1


def test_a_run_that_is_finished_and_cleared_away_while_it_is_claimed_is_not_claimed(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    is_dir = Path.is_dir

    def cleared(path):
        path.rmdir()
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", cleared)  # mkdir looks after it found that something is there
    assert acquire(tmp_path / "run", 0) is None


def elsewhere(monkeypatch):
    """Claims of this process look as if another machine had made them."""
    monkeypatch.setattr(claims, "place", lambda: "another machine")


def test_an_owner_elsewhere_lives_while_its_claim_changes(tmp_path, monkeypatch):
    elsewhere(monkeypatch)
    claim = acquire(tmp_path, 0)
    monkeypatch.undo()
    clock = [1000.0]
    monkeypatch.setattr(claims.time, "monotonic", lambda: clock[0])
    watch = Watch(lease=60)
    for _ in range(5):
        assert watch.look(tmp_path).number is None
        clock[0] += 59
        claim._write()
    os.utime(tmp_path / "claim.0", (9e9, 9e9))  # another machine's clock is of no concern
    assert watch.look(tmp_path).number is None
    clock[0] += 59
    assert watch.look(tmp_path).number is None
    assert Watch(lease=60).look(tmp_path).number is None  # who comes later begins to count later
    clock[0] += 2
    assert watch.look(tmp_path).number == 1


def test_a_claim_that_was_created_and_never_written_runs_out(tmp_path, monkeypatch):
    (tmp_path / "claim.0").touch()
    clock = [0.0]
    monkeypatch.setattr(claims.time, "monotonic", lambda: clock[0])
    watch = Watch(lease=60)
    assert watch.look(tmp_path).number is None
    clock[0] = 61
    assert watch.look(tmp_path).number == 1


def test_a_released_run_is_free_and_its_number_is_not_used_again(tmp_path):
    for number in range(3):
        assert Watch().look(tmp_path).number == number
        with acquire(tmp_path, number):
            assert Watch().look(tmp_path).number is None
    assert acquire(tmp_path, 1) is None


def test_who_takes_a_run_over_goes_on_from_its_work_and_shuts_the_old_owner_out(tmp_path):
    old = own_folder(tmp_path, 0)
    (old / "last.pth").write_text("epoch 3")
    new = own_folder(tmp_path, 1)
    assert (new / "last.pth").read_text() == "epoch 3"
    with pytest.raises(FileNotFoundError):
        (old / "last.pth").write_text("epoch 4")


def test_an_owner_that_wakes_up_late_leaves_its_successors_alone(tmp_path):
    late = acquire(tmp_path / "run", 0)
    with acquire(tmp_path / "run", 1) as successor:
        successor.forget()
    assert not (tmp_path / "run").exists()
    late._write()
    assert not (tmp_path / "run").exists()
    again = acquire(tmp_path / "run", 0)  # as --rerun does
    late._write()
    assert again._token in (tmp_path / "run" / "claim.0").read_text()
