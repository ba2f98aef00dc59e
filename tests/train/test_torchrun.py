"""Two processes, started as a user starts them, stop together; test_nodes.py compares their metrics with one's."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from timm.utils.checkpoint_saver import load_checkpoint_metadata

from topk_export.conversion.source import load_source

from .conftest import TINY, rows

LAUNCH = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--standalone")


def launch(folder, *argv, **options):
    command = [*LAUNCH, "-m", "topk_registry", "train", *TINY, "--output", str(folder), "--experiment", "two", *argv]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options
    )


def terminate_group(process, summary):
    """Send SIGTERM to a run, its launcher and its loaders' workers after the first epoch; what it printed."""
    deadline = time.monotonic() + 480
    while not summary.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGTERM)
    out, _ = process.communicate(timeout=600)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_sigterm_to_the_whole_group_loses_nothing(tmp_path, workers):
    """As ``timeout``, systemd and batch systems send it."""
    command = [sys.executable, "-m", "topk_registry", "train", *TINY, "--epochs", "100000", "-j", str(workers)]
    command += ["--output", str(tmp_path), "--experiment", "one"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, start_new_session=True, **pipes)
    out = terminate_group(process, tmp_path / "one" / "summary.csv")
    assert process.returncode == 128 + signal.SIGTERM, out
    assert "Nothing is lost" in out
    assert "Traceback" not in out
    assert "python -m topk_registry train --config" in out
    state = load_checkpoint_metadata(tmp_path / "one" / "last.pth.tar")["task_state"]
    assert len(state["progress"]["history"]) == len(rows(tmp_path / "one" / "summary.csv")) >= 1


@pytest.mark.slow
def test_sigterm_stops_both_processes_at_the_same_step_and_one_goes_on(train, tmp_path):
    """With the classifier's rows spread over both, and whole in the checkpoint."""
    flags = ["--loss", "topk_nll", "--loss-opt", "k=3", "--class-parallel"]
    flags += ["--epochs", "100000", "-b", "8", "-j", "1"]
    process = launch(tmp_path, *flags, start_new_session=True)
    summary = tmp_path / "two" / "summary.csv"
    out = terminate_group(process, summary)
    assert "Nothing is lost" in out, out
    assert "Traceback" not in out.partition("Nothing is lost")[0], out
    launcher = " ".join(("python", *LAUNCH[1:], "-m topk_registry train --config"))
    assert f"{launcher} {tmp_path}/two/args.yaml --resume {tmp_path}/two/last.pth.tar" in out
    last = tmp_path / "two" / "last.pth.tar"
    saved = load_checkpoint_metadata(last)
    done = len(rows(summary))
    assert len(saved["task_state"]["progress"]["history"]) == done >= 1
    assert len(saved["task_state"]["random"]) == 2  # the streams of both
    assert saved["state_dict"]["fc.weight"].shape == (12, 256)
    one = train(*flags, "--resume", last, "--epochs", done + 1, "-b", "16", name="one")
    assert one.status == 0, one.err
    assert len(one.summary) == done + 1
    source = load_source(one.folder)
    assert (source.loss, source.k, source.temperature) == ("topk_nll", 3, 3.0)
    assert torch.equal(source.model.fc.weight, one.checkpoint("model_best.pth.tar")["state_dict"]["fc.weight"])
