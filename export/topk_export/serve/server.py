"""Run the application on a socket, in this process."""

import asyncio
import contextlib
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn

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
