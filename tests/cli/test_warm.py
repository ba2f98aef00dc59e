"""``topk-registry doctor --warm``: kernels compiled beforehand."""

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from topk_registry.cli import main as cli
from topk_registry.cli import warm as command
from topk_registry.ops import backend
from topk_registry.ops.cpu import library

pytest.importorskip("numba")


@pytest.fixture
def untried(monkeypatch):
    """No kernels of other operators are tried, which would compile them."""
    monkeypatch.setattr(backend, "report", list)


def test_where_a_library_has_the_kernels_it_is_named(capsys, untried, monkeypatch):
    found = library.Library()
    found.path = Path("/kernels.so")
    monkeypatch.setattr(library, "library", lambda: found)
    assert command.warm([]) == 0
    assert "0 calls in" in (said := capsys.readouterr().out)
    assert said.rstrip().endswith("are kept in /kernels.so")


@pytest.mark.usefixtures("without_library")
def test_a_loss_is_warmed_and_the_folder_is_named(capsys, untried):
    assert command.warm(["focal"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("1 calls in ")
    assert said.rstrip().endswith(sys.modules["topk_registry.ops.cpu.compiling"].folder())


def test_a_loss_that_fails_is_told_and_the_others_go_on(capsys, monkeypatch, untried):
    called = []

    def loss(logits, target):
        called.append(logits.dtype)
        raise RuntimeError("no luck")

    known = command.Subject.of
    theirs = command.Subject(lambda: loss, "their_loss")
    monkeypatch.setattr(command.Subject, "of", lambda name: theirs if name == "their_loss" else known(name))
    assert command.warm(["their_loss", "focal"]) == 1
    said = capsys.readouterr().out
    assert "problem: their_loss, float32: RuntimeError: no luck" in said
    assert "2 calls" in said
    assert called


def test_kernels_that_are_switched_off_are_a_problem(capsys):
    with backend.use_backend("torch"):
        assert command.warm([]) == 1
    assert "problem: ksubset: kernels do not serve on the CPU" in capsys.readouterr().out


def test_without_a_place_to_keep_them_the_status_is_1(capsys, monkeypatch, untried):
    from topk_registry.ops.cpu import compiling

    monkeypatch.setattr(compiling._kept, "problem", "no folder can be written")
    assert command.warm([]) == 1
    assert "cannot be kept (no folder can be written): set NUMBA_CACHE_DIR" in capsys.readouterr().out


def test_an_interruption_says_that_what_is_done_stays(capsys, monkeypatch):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(command.Subject, "of", interrupted)
    assert command.warm(["focal"]) == 130
    assert "what is compiled stays" in capsys.readouterr().err


@pytest.mark.usefixtures("without_library")
def test_ctrl_c_ends_the_command_and_leaves_whole_files(tmp_path):
    """The signal comes while kernels are compiled: what the next command reads is whole, and nothing else is there."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "TOPK_REGISTRY_BACKEND": "auto"}
    command = [sys.executable, "-m", "topk_registry", "doctor", "--warm"]
    running = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + 120
        while not list(tmp_path.rglob("*.nbc")):
            assert running.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == 130
    assert f"interrupted; what is compiled stays in {tmp_path}, and the next --warm goes on from it" in said
    assert "Traceback" not in said
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.suffix for path in kept} == {".nbi", ".nbc"}
    for path in kept:  # as numba writes them
        with path.open("rb") as file:
            while file.peek(1):
                pickle.load(file)


def test_the_command_line_asks_for_what_it_can_have(capsys, monkeypatch):
    asked = []
    monkeypatch.setattr(command, "warm", lambda **options: asked.append(options) or 0)
    assert cli.main(["doctor", "--warm"]) == 0
    assert cli.main(["doctor", "--warm", "--double"]) == 0
    assert asked == [{"double": False}, {"double": True}]
    for wrong in (["--double"], ["--warm", "--json"]):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["doctor", *wrong])


@pytest.mark.slow
def test_all_losses_are_warmed(capsys):
    assert command.warm() == 0
    said = capsys.readouterr().out
    assert "problem" not in said
