"""Run the application in several processes that share a socket, and swap the model in all of them at once."""

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from prometheus_client.multiprocess import mark_process_dead

from topk_export.serve.releases import Release, Releases, open_release
from topk_export.serve.server import GRACE, TICK, Plan, make_server, problems_of, tell
from topk_export.serve.service import Service
from topk_export.serve.swaps import Step, Swaps


class Workers:
    """Several processes that serve one socket, each with the model. One that dies is started again.

    A worker accepts connections once its model has run, so ``/readyz`` is true of every worker that can be reached.
    A worker that dies within ``patience`` seconds of its start stops them all: another would die too.
    """

    patience = 10.0

    def __init__(self, listener: socket.socket, plan: Plan, count: int, releases: Releases) -> None:
        self._listener, self._plan, self._count, self._releases = listener, plan, count, releases
        self._stop = threading.Event()
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[_Worker] = []
        self._swaps = Swaps(releases, self._ask, tell, watch=plan.watch)

    def run(self) -> int:
        """Serve until SIGTERM or SIGINT; return the exit status."""
        before = {sig: signal.signal(sig, lambda *_: self._stop.set()) for sig in (signal.SIGTERM, signal.SIGINT)}
        # prometheus_client adds the counters of all processes up through files in this folder
        shared = self._releases.folder / "metrics"
        shared.mkdir()
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(shared)
        try:
            with self._swaps.on_signal():
                return self._supervise()
        finally:
            del os.environ["PROMETHEUS_MULTIPROC_DIR"]
            for sig, handler in before.items():
                signal.signal(sig, handler)

    def _supervise(self) -> int:
        self._workers = [self._start() for _ in range(self._count)]
        failed = False
        while not self._stop.wait(TICK) and not failed:
            for i, worker in enumerate(self._workers):
                if worker.process.is_alive():
                    continue
                mark_process_dead(worker.process.pid)
                worker.pipe.close()
                failed = failed or time.monotonic() - worker.started < self.patience
                if not failed:
                    self._workers[i] = self._start()
            if not failed:
                self._swaps.look()
        for worker in self._workers:
            worker.process.terminate()
        for worker in self._workers:
            worker.process.join(GRACE + 5)
            worker.process.kill()
            worker.process.join()
        return int(failed)

    def _start(self) -> "_Worker":
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_work, args=(self._listener, self._plan, self._releases.current, theirs))
        process.start()
        theirs.close()
        return _Worker(process, ours, time.monotonic())

    def _ask(self, step: Step, release: Release) -> list[str]:
        """Let all workers take a step; one that does not take a short one in time is ended, and started again."""
        problems, end = [], None if step == "prepare" else time.monotonic() + GRACE
        for worker in self._workers:
            with contextlib.suppress(OSError):  # it has died, as is seen below
                worker.pipe.send((step, release))
        for worker in self._workers:
            problem = self._answer_of(worker, end)
            if problem is not None:
                problems.append(problem)
                if end is not None:
                    worker.process.kill()
        return problems

    def _answer_of(self, worker: "_Worker", end: float | None) -> str | None:
        """Wait for a worker's answer to a step: what went wrong, or None."""
        try:
            while not worker.pipe.poll(TICK):
                if self._stop.is_set():
                    return "the service is stopping"
                if end is not None and time.monotonic() > end:
                    return f"worker {worker.process.pid} does not answer"
            return worker.pipe.recv()
        except (EOFError, OSError):
            return f"worker {worker.process.pid} has died"


@dataclass(frozen=True)
class _Worker:
    process: Any
    pipe: Any
    started: float


def _work(listener: socket.socket, plan: Plan, release: Release, pipe: Connection) -> None:
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the first process hears it for all
    # the kernel hands a connection to any worker that accepts, so one that accepts must be ready
    server = make_server(open_release(release, plan.model), plan, warm=True, release=release)
    service: Service = server.config.app.state.service  # type: ignore[union-attr]
    _when_parent_ends(lambda: setattr(server, "should_exit", True))
    threading.Thread(target=_obey, args=(service, plan, pipe), daemon=True).start()
    server.run(sockets=[listener])


def _obey(service: Service, plan: Plan, pipe: Connection) -> None:
    """Take the steps that the first process asks for, once the service has started."""
    service.started.wait()
    with contextlib.suppress(EOFError, OSError):
        while True:
            step, release = pipe.recv()
            pipe.send(next(iter(problems_of(service, plan, step, release)), None))


def _when_parent_ends(act: Callable[[], None]) -> None:
    """Call ``act`` once the parent process is gone, however it went."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        act()

    threading.Thread(target=watch, daemon=True).start()
