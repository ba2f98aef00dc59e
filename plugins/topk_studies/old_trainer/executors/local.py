"""An executor of worker processes on this machine, each with its share of the processors and its own GPU."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

from topk_studies.old_trainer.executors.errors import WorkerDiedError
from topk_studies.old_trainer.executors.pool import Call, Interruptible, PoolExecutor

GRACE = 10.0  # seconds that an idle process gets to end by itself
SPAWN = multiprocessing.get_context("spawn")
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
GPUS = "CUDA_VISIBLE_DEVICES"
_starting = threading.Lock()


class LocalExecutor(PoolExecutor):
    """Does calls in ``workers`` processes; a process that dies takes its own call with it and is replaced.

    ``concurrent.futures.ProcessPoolExecutor`` gives up all calls when one process dies, and has no environment for
    each process.

    Args:
        workers: number of processes.
        device: as in ``timm train``; with ``"cuda"``, each process sees one of the visible GPUs, in turn.
        gpus: names of the GPUs; None: those that the environment or torch tells.
    """

    def __init__(self, workers: int, *, device: str = "cpu", gpus: Sequence[str] | None = None) -> None:
        super().__init__([_Process(environment) for environment in environments(workers, device, gpus)])


def environments(workers: int, device: str, gpus: Sequence[str] | None = None) -> list[dict[str, str]]:
    """The variables that each worker process starts with: its share of the processors, or fewer threads where
    OMP_NUM_THREADS says so."""
    share, wanted = max(1, processors() // workers), os.environ.get("OMP_NUM_THREADS", "")
    threads = dict.fromkeys(THREADS, str(min(share, max(1, int(wanted))) if wanted.isdecimal() else share))
    names = (visible_gpus() if gpus is None else gpus) if device == "cuda" else []
    return [{**threads, **({GPUS: names[i % len(names)]} if names else {})} for i in range(workers)]


def processors() -> int:
    """Number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def visible_gpus() -> Sequence[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get(GPUS)
    if named is None:
        import torch

        return [str(i) for i in range(torch.cuda.device_count())]
    gpus: list[str] = []
    for name in map(str.strip, named.split(",")):
        if not name or name.startswith("-"):
            break  # CUDA ignores all names after one that is no device
        gpus.append(name)
    return gpus


class _Process:
    """One process, started when it is first needed and again after it died."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._process: Any = None
        self._pipe: Connection | None = None
        self._lock = threading.Lock()  # of what follows, and of starting and killing the process
        self._idle = True  # no call has the pipe
        self._busy = False  # the process does a call
        self._closed = False

    def call(self, task: Call, stopped: Callable[[], bool]) -> Any:
        pipe = self._ready(stopped)
        try:
            pipe.send(task)
            pipe.recv()  # from here on the process keeps an interrupt for this call
            self._begin(stopped)
            done, value = pipe.recv()
        except (EOFError, OSError) as error:
            self._process.join()
            raise WorkerDiedError(
                f"its process ended with status {self._process.exitcode} (a negative one is a signal: 9 is the "
                "system's, for want of memory)"
            ) from error
        finally:
            with self._lock:
                self._busy, self._idle = False, True
        if not done:
            raise value
        return value

    def interrupt(self) -> None:
        with self._lock:
            if self._busy and self._process.is_alive():
                os.kill(self._process.pid, signal.SIGINT)

    def close(self) -> None:
        """End the process: an idle one by itself, so that it frees its semaphores, one within a call at once."""
        with self._lock:
            self._closed = True
            if self._process is None:
                return
            if self._idle and self._pipe is not None:
                self._pipe.close()
            else:
                self._process.kill()
        self._process.join(GRACE)
        self._process.kill()
        self._process.join()

    def _begin(self, stopped: Callable[[], bool]) -> None:
        with self._lock:
            self._busy = True
        if stopped():
            self.interrupt()

    def _ready(self, stopped: Callable[[], bool]) -> Connection:
        with self._lock:
            if self._closed:
                raise WorkerDiedError("the executor was shut down")
            if stopped():
                raise KeyboardInterrupt
            if self._pipe is None or not self._process.is_alive():
                self._pipe, theirs = SPAWN.Pipe()
                self._process = SPAWN.Process(target=_serve_calls, args=(theirs,))
                with _starting, _environment(self._environment), _without_interrupts():
                    self._process.start()
                theirs.close()  # so that the end of the process is the end of the pipe
            self._idle = False
            return self._pipe


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """The variables, for a process that is started now: libraries read them before any code of ours runs."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """A process started now keeps an interrupt back until it is ready for one."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # the first process would start it, which lets interrupts through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve_calls(pipe: Connection) -> None:
    """The body of a worker process."""
    if hasattr(os, "setsid"):
        os.setsid()  # Ctrl-C reaches it through the executor alone
    os.dup2(2, 1)  # a run's prints go beside the command's own output
    threading.Thread(target=_end_with_parent, daemon=True).start()
    calls = Interruptible()
    try:
        while True:
            task = pipe.recv()
            calls.ready()
            pipe.send(None)
            pipe.send(calls.answer(*task))
    except (EOFError, BrokenPipeError):
        return


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
