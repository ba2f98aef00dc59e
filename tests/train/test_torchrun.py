"""Two processes, started as a user starts them, see the batches and get the metrics of one."""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .conftest import TINY

LAUNCH = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--standalone")


def launch(folder, *argv, **options):
    command = [*LAUNCH, "-m", "topk_registry", "train", *TINY, "--output", str(folder), "--experiment", "two", *argv]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)


def rows(path: Path):
    with open(path) as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


@pytest.mark.slow
def test_two_processes_get_the_metrics_of_one(train, tmp_path):
    flags = ("--loss", "smooth_topk_svm", "--loss-opt", "k=3", "--model-ema", "--model-ema-decay", "0.5", "--epochs", "3")
    one = train(*flags)
    # one process sees batches of 16, each of two sees 8 of the same 16
    process = launch(tmp_path, *flags, "-b", "8", "-vb", "8")
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 0, out
    two = rows(tmp_path / "two" / "summary.csv")
    assert len(two) == len(one.summary) == 3
    for ours, theirs in zip(one.summary, two, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-4), (ours, theirs)


@pytest.mark.slow
def test_sigterm_stops_all_processes_and_the_run_goes_on(train, tmp_path):
    flags = ("--loss", "topk_nll", "--loss-opt", "k=3", "--epochs", "200", "-b", "8")
    process = launch(tmp_path, *flags)
    summary = tmp_path / "two" / "summary.csv"
    deadline = time.monotonic() + 200
    while not summary.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert "Nothing is lost" in out, out
    done = len(rows(summary))
    assert 1 <= done < 200
    resumed = launch(tmp_path, *flags, "--epochs", str(done + 1), "--resume", "auto")
    out, _ = resumed.communicate(timeout=240)
    assert resumed.returncode == 0, out
    assert [row["epoch"] for row in rows(summary)] == list(range(done + 1))
