"""Run the application on a socket, in one process or several that share it."""

import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from topk_export.runtime.predictor import Predictor
from topk_export.serve.app import create_app
from topk_export.serve.connections import Connections, WatchedProtocol
from topk_export.serve.limits import Access, Limits

GRACE = 10  # seconds for requests in progress once the service is told to stop


@dataclass(frozen=True)
class Plan:
    """A service as it can be handed to another process.

    Args:
        model: keyword arguments of :class:`~topk_export.Predictor`.
        limits: bounds of the clients.
        access: who the clients are.
        proxies: addresses of proxies whose word on a client's address is taken.
        log: file that takes a line a prediction.
    """

    model: dict[str, Any]
    limits: Limits = field(default_factory=Limits)
    access: Access = field(default_factory=Access)
    proxies: tuple[str, ...] = ()
    log: str | None = None


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


def make_server(predictor: Predictor, plan: Plan, *, warm: bool = False) -> uvicorn.Server:
    """Build uvicorn's server of a loaded model; ``warm``: see :func:`create_app`."""
    config = uvicorn.Config(
        create_app(predictor, plan.limits, plan.access, plan.log, warm=warm),
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


def serve_forever(listener: socket.socket, predictor: Predictor, plan: Plan) -> None:
    make_server(predictor, plan).run(sockets=[listener])


class Workers:
    """Several processes that serve one socket, each with the model. One that dies is started again.

    A worker accepts connections once its model has run, so ``/readyz`` is true of every worker that can be reached.
    A worker that dies within ``patience`` seconds of its start stops them all: another would die too.
    """

    patience = 10.0

    def __init__(self, listener: socket.socket, plan: Plan, count: int) -> None:
        self._listener, self._plan, self._count = listener, plan, count
        self._stop = threading.Event()
        self._context = multiprocessing.get_context("spawn")

    def run(self) -> int:
        """Serve until SIGTERM or SIGINT; return the exit status."""
        before = {sig: signal.signal(sig, lambda *_: self._stop.set()) for sig in (signal.SIGTERM, signal.SIGINT)}
        # prometheus_client adds the counters of all processes up through files in this folder
        shared = tempfile.mkdtemp(prefix="topk-metrics-")
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = shared
        try:
            return self._supervise()
        finally:
            del os.environ["PROMETHEUS_MULTIPROC_DIR"]
            shutil.rmtree(shared, ignore_errors=True)
            for sig, handler in before.items():
                signal.signal(sig, handler)

    def _supervise(self) -> int:
        workers = [self._start() for _ in range(self._count)]
        failed = False
        while not self._stop.wait(0.1) and not failed:
            for i, (process, started) in enumerate(workers):
                if process.is_alive():
                    continue
                failed = failed or time.monotonic() - started < self.patience
                if not failed:
                    workers[i] = self._start()
        for process, _ in workers:
            process.terminate()
        for process, _ in workers:
            process.join(GRACE + 5)
            process.kill()
            process.join()
        return int(failed)

    def _start(self) -> tuple[Any, float]:
        process = self._context.Process(target=_work, args=(self._listener, self._plan))
        process.start()
        return process, time.monotonic()


def _work(listener: socket.socket, plan: Plan) -> None:
    # the kernel hands a connection to any worker that accepts, so one that accepts must be ready
    server = make_server(Predictor(**plan.model), plan, warm=True)
    _when_parent_ends(lambda: setattr(server, "should_exit", True))
    server.run(sockets=[listener])


def _when_parent_ends(act: Callable[[], None]) -> None:
    """Call ``act`` once the parent process is gone, however it went."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        act()

    threading.Thread(target=watch, daemon=True).start()
