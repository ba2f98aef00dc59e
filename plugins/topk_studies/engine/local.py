"""An executor of worker processes on this machine, each with its share of the processors and its own GPU."""

import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

SPAWN = multiprocessing.get_context("spawn")
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
GPUS = "CUDA_VISIBLE_DEVICES"
_starting = threading.Lock()


class WorkerDiedError(RuntimeError):
    """A worker process ended in the middle of a call."""


class LocalExecutor(Executor):
    """Does calls in ``workers`` processes; a process that dies takes its own call with it and is replaced.

    ``concurrent.futures.ProcessPoolExecutor`` gives up all calls when one process dies, and has no environment for
    each process.

    Args:
        workers: number of processes.
        device: as in ``timm train``; with ``"cuda"``, each process sees one of the visible GPUs, in turn.
    """

    def __init__(self, workers: int, *, device: str = "cpu") -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Any] | None] = queue.SimpleQueue()
        self._workers = [_Worker(environment) for environment in environments(workers, device)]
        self._threads = [threading.Thread(target=self._serve, args=(one,), daemon=True) for one in self._workers]
        self._closed = False
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        if self._closed:
            raise RuntimeError("the executor was shut down")
        future: Future[Any] = Future()
        self._calls.put((future, (fn, args, kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the processes once their calls are done.

        With ``cancel_futures``, calls that wait are cancelled and those under way are interrupted (SIGINT), so that
        they can save their state.
        """
        self._closed = True
        if cancel_futures:
            self._cancel()
            for worker in self._workers:
                worker.interrupt()
        for _ in self._threads:
            self._calls.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def kill(self) -> None:
        """End the processes now."""
        self._closed = True
        self._cancel()
        for worker in self._workers:
            worker.close()
            self._calls.put(None)

    def _cancel(self) -> None:
        try:
            while True:
                call = self._calls.get_nowait()
                if call is not None:
                    call[0].cancel()
        except queue.Empty:
            pass

    def _serve(self, worker: "_Worker") -> None:
        while (call := self._calls.get()) is not None:
            future, task = call
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(worker.call(task))
                except BaseException as error:
                    future.set_exception(error)
        worker.close()


def environments(workers: int, device: str) -> list[dict[str, str]]:
    """The variables that each worker process starts with."""
    threads = dict.fromkeys(THREADS, str(max(1, (os.cpu_count() or 1) // workers)))
    gpus = visible_gpus() if device == "cuda" else []
    return [{**threads, **({GPUS: gpus[i % len(gpus)]} if gpus else {})} for i in range(workers)]


def visible_gpus() -> Sequence[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get(GPUS)
    if named is None:
        import torch

        return [str(i) for i in range(torch.cuda.device_count())]
    found: list[str] = []
    for name in map(str.strip, named.split(",")):
        if not name or name.startswith("-"):
            break  # CUDA ignores all names after one that is no device
        found.append(name)
    return found


class _Worker:
    """One process, started when it is first needed and again after it died."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._process: Any = None
        self._pipe: Connection | None = None
        self._busy = False
        self._closed = False

    def call(self, task: tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]) -> Any:
        pipe = self._ready()
        self._busy = True
        try:
            pipe.send(task)
            done, value = pipe.recv()
        except (EOFError, OSError) as error:
            self._process.join()
            raise WorkerDiedError(
                f"its process ended with status {self._process.exitcode} (a negative one is a signal: 9 is the "
                "system's, for want of memory)"
            ) from error
        finally:
            self._busy = False
        if not done:
            raise value
        return value

    def interrupt(self) -> None:
        if self._busy and self._process is not None and self._process.is_alive():
            os.kill(self._process.pid, signal.SIGINT)

    def close(self) -> None:
        self._closed = True
        if self._process is not None:
            self._process.kill()
            self._process.join()

    def _ready(self) -> Connection:
        if self._closed:
            raise WorkerDiedError("the executor was shut down")
        if self._pipe is None or not self._process.is_alive():
            self._pipe, theirs = SPAWN.Pipe()
            self._process = SPAWN.Process(target=_serve_calls, args=(theirs,))
            with _starting, _environment(self._environment), _without_interrupts():
                self._process.start()
            theirs.close()  # so that the end of the process is the end of the pipe
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
    """A process started now keeps an interrupt back until it can answer it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
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
    try:
        while True:
            fn, args, kwargs = pipe.recv()
            pipe.send(_answer(fn, args, kwargs))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return


def _answer(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        return True, fn(*args, **kwargs)
    except BaseException as error:
        return False, error
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
