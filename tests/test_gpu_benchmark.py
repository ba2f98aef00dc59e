"""The measurements on a GPU, rehearsed on the CPU in tiny sizes."""

import json
import math
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import STEPS, Bench, last_line, main, time_limit

ROOT = Path(__file__).parents[1]


@pytest.mark.nightly
def test_every_other_step_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # other tests compile kernels
    file, steps = tmp_path / "gpu.json", [step for step in STEPS if step != "kernels"]
    assert main(["--device", "cpu", "--output", str(file), "--seconds", "1000", "--steps", *steps]) == 0, (
        file.read_text()
    )
    results = json.loads(file.read_text())
    assert set(results) == {*steps, "seconds"}
    figures = results["losses"]["8 x 128, indices, torch.float32"]
    assert set(figures["from Python"]) == set(figures["host alone"])
    assert {"cross-entropy", "focal", "smooth_topk_svm at 0.1"} < set(figures["from Python"])
    assert len(results["losses"]) == 6  # two shapes, two kinds of targets, compiled losses and large k
    assert all(microseconds > 0 for microseconds in figures["from Python"].values())
    assert results["environment"]["versions"]["torch"] == torch.__version__
    assert math.isfinite(results["training"]["smooth_topk_svm"]["last loss"])
    assert results["onnx"]["resnet18"]["nodes per provider"]["CPUExecutionProvider"] > 0
    assert "tests collected" in results["tests"]["tests"]["last line"]


@pytest.mark.nightly
def test_all_kernels(tmp_path):
    """Compare kernels with definitions in another process, in which Triton interprets."""
    file = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--output", str(file), "--seconds", "1000"]
    done = subprocess.run([*command, "--steps", "kernels"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr + file.read_text()
    table = json.loads(file.read_text())["kernels"]
    assert len(table) == 8
    for figures in (one for row in table.values() for one in row.values()):
        assert figures["kernel / definition"] == pytest.approx(figures["kernel"] / figures["definition"])
        assert figures["largest difference"] <= 0.01


class Event:
    """Stands in for an event of CUDA."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.time = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        return (end.time - self.time) * 1e3


class Graph:
    """Stands in for a CUDA graph."""

    replayed = 0

    def replay(self) -> None:
        Graph.replayed += 1


@pytest.fixture
def gpu(monkeypatch) -> Bench:
    """A bench that believes that the CPU is a GPU."""
    bench = Bench("cpu")
    bench.is_gpu = True
    bench.rounds = 2
    bench.calls = 3
    stream = SimpleNamespace(wait_stream=lambda other: None)
    fakes = {
        "Event": Event,
        "CUDAGraph": Graph,
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda one: nullcontext(),
        "graph": lambda one: nullcontext(),
        "synchronize": lambda: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return bench


def test_times_on_the_device(gpu):
    times = gpu.device_times({"short": lambda: time.sleep(0.001), "long": lambda: time.sleep(0.004)})
    assert 1000 <= times["short"] < times["long"]
    assert times["long"] >= 4000


def test_losses_run_in_cuda_graphs(gpu):
    figures = gpu._losses(8, 128, "indices", torch.float32, {"focal": ("focal", {})})
    assert set(figures) == {"from Python", "host alone", "CUDA graph"}
    assert set(figures["CUDA graph"]) == {"cross-entropy", "focal"}
    assert Graph.replayed > 0


def test_a_loss_that_cannot_be_captured_leaves_its_error(gpu):
    calls = []

    def step() -> None:
        calls.append(1)
        if len(calls) > 20:
            raise RuntimeError("not permitted when stream is capturing")

    gpu.calls, gpu.rounds = 1, 10  # ten calls from Python, ten of the host alone
    figures = gpu._figures({"loss": step})
    assert "not permitted" in figures["CUDA graph"]["loss"]


def test_rows_that_fail_or_come_too_late_are_recorded(tmp_path, monkeypatch, capsys):
    def rows(bench):
        yield "right", lambda: {"figure": 1.0}
        yield "wrong", lambda: 1 / 0
        yield "slow", lambda: time.sleep(10)
        yield "after", lambda: {"figure": 2.0}

    monkeypatch.setattr(Bench, "kernels", rows)
    file = tmp_path / "gpu.json"
    command = ["--device", "cpu", "--output", str(file), "--steps", "kernels", "--seconds", "1"]
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert main(command) == 1
    found = json.loads(file.read_text())["kernels"]
    assert found["right"] == {"figure": 1.0}
    assert "ZeroDivisionError" in found["wrong"]["error"]
    assert "TimeoutError" in found["slow"]["error"]
    assert "skipped" in found["after"]
    assert "wrong: FAILED" in capsys.readouterr().out
    assert main([*command, "--rows", "right"]) == 0


def test_a_block_without_a_timeout_ends_the_timer():
    with time_limit(0.2):
        pass
    time.sleep(0.3)
    with pytest.raises(TimeoutError, match="longer"), time_limit(0.05):
        time.sleep(5)


def test_tests_that_are_not_done_in_time_are_counted():
    program = "import time; print('a PASSED', 'b FAILED', sep=chr(10), flush=True); time.sleep(60)"
    found = last_line([sys.executable, "-c", program], 3.0)
    assert found["error"].endswith("not done after 3 s: 1 passed, 1 failed")
    assert last_line([sys.executable, "-c", "print(1); print(2)"], 60.0) == {"last line": "2"}
    assert last_line([sys.executable, "-c", "print(3); exit(1)"], 60.0) == {"error": "3"}
