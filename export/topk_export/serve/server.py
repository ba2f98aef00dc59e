"""Run the application on a socket, in one process or several that share it."""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import uvicorn
from prometheus_client.multiprocess import mark_process_dead

from topk_export.runtime.predictor import Predictor
from topk_export.serve.app import create_app
from topk_export.serve.connections import Connections, WatchedProtocol
from topk_export.serve.limits import Access, Limits
from topk_export.serve.releases import Release, Releases, open_release
from topk_export.serve.service import Service
from topk_export.serve.swaps import Step, Swaps

GRACE = 10  # seconds for requests in progress once the service is told to stop
TICK = 0.1  # seconds between two looks at workers and files


@dataclass(frozen=True)
class Plan:
    """A service as it can be handed to another process.

    Args:
        model: keyword arguments of :class:`~topk_export.Predictor`, but for its path.
        limits: bounds of the clients.
        access: who the clients are.
        proxies: addresses of proxies whose word on a client's address is taken.
        log: file that takes a line a prediction.
        watch: serve new contents of the model's files as they come.
    """

    model: dict[str, Any]
    limits: Limits = field(default_factory=Limits)
    access: Access = field(default_factory=Access)
    proxies: tuple[str, ...] = ()
    log: str | None = None
    watch: bool = False


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket, bound here so that port 0 can be told and a taken port is one line."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    # asyncio sets this on sockets of its own making only; without it every answer waits 40 ms for a delayed ACK
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def make_server(
    predictor: Predictor, plan: Plan, *, warm: bool = False, release: Release | None = None
) -> uvicorn.Server:
    """Build uvicorn's server of a loaded model; ``warm`` and ``release``: see :func:`create_app`."""
    config = uvicorn.Config(
        create_app(predictor, plan.limits, plan.access, plan.log, warm=warm, release=release),
        http=WatchedProtocol,
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=bool(plan.proxies),
        forwarded_allow_ips=list(plan.proxies),
        timeout_keep_alive=int(plan.limits.idle_seconds) + 1,  # WatchedProtocol closes sooner
        timeout_graceful_shutdown=GRACE,
    )
    config.watch = Connections(plan.limits, plan.proxies)  # type: ignore[attr-defined]
    return uvicorn.Server(config)


def serve_forever(listener: socket.socket, predictor: Predictor, plan: Plan, releases: Releases) -> None:
    """Serve in this process until SIGTERM or SIGINT."""
    server = make_server(predictor, plan, release=releases.current)
    service: Service = server.config.app.state.service  # type: ignore[union-attr]
    swaps = Swaps(releases, lambda step, release: problems_of(service, plan, step, release), tell, watch=plan.watch)
    # uvicorn raises the signal again that ended it: as an exit it lets the caller clean up
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with swaps.on_signal(), _repeated(swaps.look):
        server.run(sockets=[listener])


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


def problems_of(service: Service, plan: Plan, step: Step, release: Release) -> list[str]:
    """Let the service of this process take a step of a swap; return what went wrong."""
    service.started.wait()
    assert service.loop is not None
    steps = {
        "prepare": lambda: service.prepare(lambda: open_release(release, plan.model), release),
        "hold": service.hold,
        "switch": service.switch,
        "drop": service.drop,
    }
    try:
        asyncio.run_coroutine_threadsafe(steps[step](), service.loop).result()
    except Exception as error:  # onnxruntime's errors share no base class below Exception
        return [str(error)]
    return []


def tell(line: str) -> None:
    """Print a line for whoever runs the service; its terminal may be gone."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _repeated(act: Callable[[], None]) -> Iterator[None]:
    """Call ``act`` again and again in a thread."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(TICK):
            act()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()


def _when_parent_ends(act: Callable[[], None]) -> None:
    """Call ``act`` once the parent process is gone, however it went."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        act()

    threading.Thread(target=watch, daemon=True).start()
