"""Worker processes of this machine."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import CancelledError, wait
from pathlib import Path

import pytest

from topk_registry.executors.errors import WorkerDiedError
from topk_registry.executors.local import GPUS, THREADS, LocalExecutor, environments, processors, visible_gpus
from topk_registry.executors.pool import Interruptible

LOCKED = """
from topk_registry.executors.local import LocalExecutor
from tests.executors.calls import lock

if __name__ == "__main__":
    executor = LocalExecutor(2)
    print(executor.submit(lock).result())
    executor.kill()
"""


@pytest.fixture
def executor():
    executors = []

    def start(*args, **kwargs):
        executors.append(LocalExecutor(*args, **kwargs))
        return executors[-1]

    yield start
    for one in executors:
        one.kill()


def nap() -> None:
    """Wait in steps: a signal that comes just before a system call interrupts Python, but not the call."""
    for _ in range(12_000):
        time.sleep(0.01)
    raise TimeoutError("no interrupt within two minutes")


def test_calls_are_answered_and_errors_come_back(executor):
    workers = executor(2)
    assert list(workers.map(abs, [-1, 2, -3])) == [1, 2, 3]
    with pytest.raises(ZeroDivisionError):
        workers.submit(divmod, 1, 0).result()


def test_a_process_that_dies_takes_its_own_call_alone(executor):
    workers = executor(1)
    futures = [workers.submit(abs, -1), workers.submit(os._exit, 3), workers.submit(abs, -2)]
    wait(futures)
    assert (futures[0].result(), futures[2].result()) == (1, 2)
    with pytest.raises(WorkerDiedError, match="status 3"):
        futures[1].result()


@pytest.mark.slow
def test_an_idle_process_frees_its_semaphores_at_the_end(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(LOCKED)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=300, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "locked\n", "")


def test_a_shutdown_that_cancels_interrupts_what_is_under_way(executor):
    workers = executor(1)
    pid = workers.submit(os.getpid).result()
    under_way, waiting = workers.submit(nap), workers.submit(abs, -1)
    while not under_way.running():
        time.sleep(0.001)
    workers.shutdown(cancel_futures=True)
    assert waiting.cancelled()
    with pytest.raises(KeyboardInterrupt):
        under_way.result()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(RuntimeError, match="shut down"):
        workers.submit(abs, 1)


def starting(workers):
    """The process of the first worker, as soon as there is one: it has loaded nothing yet."""
    end = time.monotonic() + 600
    while workers.workers[0]._process is None or workers.workers[0]._process.pid is None:
        assert time.monotonic() < end
        time.sleep(0.001)
    return workers.workers[0]._process.pid


def test_an_interrupt_while_a_worker_starts_waits_for_its_call(executor):
    workers = executor(1)
    future = workers.submit(nap)
    starting(workers)
    workers.interrupt()
    with pytest.raises(KeyboardInterrupt):
        future.result(timeout=600)
    assert workers.submit(abs, -1).result(timeout=600) == 1


def test_ctrl_c_at_a_terminal_does_not_end_a_worker_that_starts(executor):
    """The executor's process has it too, and tells the worker."""
    workers = executor(1)
    future = workers.submit(abs, -1)
    os.kill(starting(workers), signal.SIGINT)
    assert future.result(timeout=600) == 1


def test_no_interrupt_is_lost_wherever_the_call_is(executor):
    workers = executor(1)
    for lead in range(100):
        future = workers.submit(nap)
        for _ in range(lead % 10):
            time.sleep(0)  # other threads' turn
        workers.interrupt()
        with pytest.raises((KeyboardInterrupt, CancelledError)):
            future.result(timeout=600)
    assert workers.submit(abs, -1).result(timeout=600) == 1


def test_an_interrupt_reaches_the_call_that_was_announced_and_no_later_one():
    before = signal.getsignal(signal.SIGINT)
    try:
        calls = Interruptible()
        calls.ready()
        signal.raise_signal(signal.SIGINT)
        stopped = calls.answer(abs, (-1,), {})
        assert (stopped[0], type(stopped[1])) == (False, KeyboardInterrupt)
        signal.raise_signal(signal.SIGINT)  # too late
        calls.ready()
        assert calls.answer(abs, (-1,), {}) == (True, 1)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("named", "found"),
    [("2,5", ["2", "5"]), ("GPU-8a1f, MIG-77", ["GPU-8a1f", "MIG-77"]), ("", []), ("-1", []), ("0,-1,1", ["0"])],
)
def test_the_visible_gpus_are_those_that_the_environment_names(monkeypatch, named, found):
    monkeypatch.setenv(GPUS, named)
    assert visible_gpus() == found


def test_without_the_environments_word_all_gpus_are_visible(monkeypatch):
    monkeypatch.delenv(GPUS, raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert visible_gpus() == ["0", "1", "2"]


def test_workers_take_turns_over_the_gpus(monkeypatch):
    monkeypatch.setenv(GPUS, "4,6")
    assert [each[GPUS] for each in environments(5, "cuda")] == ["4", "6", "4", "6", "4"]
    assert all(GPUS not in each for each in environments(2, "cpu") + environments(2, "cuda:1"))
    monkeypatch.setenv(GPUS, "")
    assert all(GPUS not in each for each in environments(2, "cuda"))  # no GPU: the CPU, as in timm train


@pytest.mark.parametrize(("wanted", "threads"), [(None, 8), ("3", 3), ("64", 8), ("0", 1), ("8,2", 8)])
def test_workers_share_the_processors_of_this_process(monkeypatch, wanted, threads):
    monkeypatch.setattr("topk_registry.executors.local.processors", lambda: 16)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if wanted is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", wanted)
    assert environments(2, "cpu") == [dict.fromkeys(THREADS, str(threads))] * 2


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processors cannot be taken away here")
def test_processors_that_a_process_may_not_use_do_not_count():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert processors() == 1
    finally:
        os.sched_setaffinity(0, before)


def meet(folder: Path, count: int) -> str:
    """Wait until so many processes are here at once, and say which GPU this one sees."""
    (folder / str(os.getpid())).touch()
    end = time.monotonic() + 600
    while len(list(folder.iterdir())) < count:
        assert time.monotonic() < end
        time.sleep(0.01)
    return os.environ[GPUS]


def test_a_process_starts_with_its_own_gpu(executor, monkeypatch, tmp_path):
    monkeypatch.setenv(GPUS, "4,6")
    workers = executor(2, device="cuda")
    both = [workers.submit(meet, tmp_path, 2) for _ in range(2)]
    assert {future.result() for future in both} == {"4", "6"}
    assert os.environ[GPUS] == "4,6"
