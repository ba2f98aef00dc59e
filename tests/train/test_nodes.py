"""Two nodes, by two agents of torchrun on this machine; one is killed and started again in the middle of an epoch."""

import os
import subprocess
import sys
import time

import psutil
import pytest

from tests.conftest import Site
from tests.ports import free_port

from .conftest import TINY, rows

pytestmark = pytest.mark.slow
HELD_AT = 9  # of 18 updates: the third of the second epoch, after the checkpoint of the eighth
PATIENCE = 480  # seconds, for a machine under load

LOGGER = f"""
import os, time

class Held:
    '''Note each update; the first part of the run waits at one until a file allows it to go on.'''

    run_id = None

    def __init__(self, *, run):
        self.folder, self.first = run.folder, not run.update

    def log(self, values, *, update):
        with open(self.folder / "noted.txt", "a") as file:
            print(os.environ["RANK"], "epoch" if "epoch" in values else "update", update, file=file)
        deadline = time.monotonic() + {PATIENCE}
        while self.first and update == {HELD_AT} and not (self.folder / "go").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def close(self, status):
        pass
"""


@pytest.fixture
def agents(tmp_path):
    """``agents(node)``: start the agent of a node, with one process; it is killed in the end if it is still there."""
    site = Site(tmp_path / "site")
    site.module("held_logger", LOGGER)
    site.distribution("held-logger", {"held": "held_logger:Held"}, group="topk_registry.loggers")
    endpoint = f"127.0.0.1:{free_port()}"
    started = []

    def start(node, *argv):
        rendezvous = f"is_host={int(node == 0)},keep_alive_interval=1,keep_alive_max_attempt=8"
        launch = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=2", "--rdzv-backend=c10d", "--rdzv-id=test"]
        launch += [f"--rdzv-endpoint={endpoint}", f"--rdzv-conf={rendezvous}", "--local-addr=127.0.0.1"]
        command = [sys.executable, "-m", "torch.distributed.run", *launch, "-m", "topk_registry", "train", *argv]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(site.root)}
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # as docs/examples/train.sbatch says
        log = open(tmp_path / f"agent-{len(started)}.log", "w")  # noqa: SIM115
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        started.append((process, log))
        return process

    start.said = lambda: "\n".join((tmp_path / f"agent-{i}.log").read_text() for i in range(len(started)))
    yield start
    for process, log in started:
        if process.poll() is None:
            kill_node(process)
        log.close()


def kill_node(agent):
    """Kill an agent and its process, as the end of a machine does; torchrun puts them into sessions of their own."""
    for process in [*psutil.Process(agent.pid).children(recursive=True), psutil.Process(agent.pid)]:
        process.kill()
    agent.wait()


def test_a_killed_node_is_replaced_and_the_run_goes_on_from_its_last_checkpoint(agents, train, tmp_path):
    flags = ["--loss", "smooth_topk_svm", "--loss-opt", "k=3", "--model-ema", "--model-ema-decay", "0.5"]
    flags += ["--epochs", "3"]
    one = train(*flags, name="one")  # sees batches of 16; each of two processes sees 8 of the same 16
    folder = tmp_path / "two"
    argv = [*TINY, *flags, "-b", "8", "-vb", "8", "--output", str(tmp_path), "--experiment", "two"]
    argv += ["--resume", "auto", "--recovery-interval", "2", "--logger", "held", "--log-interval", "1"]
    staying, lost = agents(0, *argv), agents(1, *argv)
    noted = folder / "noted.txt"
    deadline = time.monotonic() + PATIENCE
    while not noted.exists() or f"update {HELD_AT}" not in noted.read_text():
        assert staying.poll() is None, agents.said()
        assert time.monotonic() < deadline, agents.said()
        time.sleep(0.1)
    kill_node(lost)
    (folder / "go").touch()
    back = agents(1, *argv)
    assert [staying.wait(PATIENCE), back.wait(PATIENCE)] == [0, 0], agents.said()

    lines = [line.split() for line in noted.read_text().splitlines()]
    updates = [int(number) for _, kind, number in lines if kind == "update"]
    assert updates == [*range(1, HELD_AT + 1), *range(HELD_AT, 19)]  # the eighth was saved, the ninth is done again
    assert [int(number) for _, kind, number in lines if kind == "epoch"] == [6, 12, 18]
    assert {rank for rank, *_ in lines} == {"0"}  # the first process alone logs
    assert "at epoch 2, batch 3" in agents.said()
    two = rows(folder / "summary.csv")
    assert len(two) == len(one.summary) == 3
    for ours, theirs in zip(one.summary, two, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-4), (ours, theirs)
