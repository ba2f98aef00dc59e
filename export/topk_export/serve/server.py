"""HTTP server that runs the application until the process receives SIGTERM or SIGINT."""

import asyncio
import socket
import time
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from topk_export.serve.app import Service, create_app
from topk_export.serve.limits import Limits

CONNECTIONS = 1000
DRAIN_SECONDS = 1.0  # seconds from the first signal until the server accepts no more connections


class TimedProtocol(H11Protocol):
    """HTTP/1.1 protocol that closes a connection if no complete request header arrives in time.

    The time starts when the connection opens, and again after each answer. The limit in seconds is the attribute
    ``header_seconds`` of the uvicorn configuration.
    """

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()
        elif self._timer is None:
            seconds = self.config.header_seconds  # type: ignore[attr-defined]
            self._timer = self.loop.call_later(seconds, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Server(uvicorn.Server):
    """uvicorn server that answers all accepted requests before it stops.

    After the first signal, the server still accepts requests for ``DRAIN_SECONDS`` seconds, but each answer tells the
    client to close its connection. After this time, or after a second signal, the server accepts no more connections,
    and waits until the requests in progress are answered. If SIGINT arrives during this wait, the server stops at once.
    """

    _stop_at: float | None = None

    def handle_exit(self, sig: int, frame: Any) -> None:
        if self._stop_at is not None:
            super().handle_exit(sig, frame)
            return
        service: Service = self.config.app.state.service  # type: ignore[union-attr]
        service.draining = True
        self._stop_at = time.monotonic() + DRAIN_SECONDS

    async def on_tick(self, counter: int) -> bool:
        if self._stop_at is not None and time.monotonic() >= self._stop_at:
            self.should_exit = True
        return await super().on_tick(counter)


def listen(host: str, port: int) -> socket.socket:
    """Open and return a TCP socket that listens on an address. If ``port`` is 0, the system chooses a free port."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    # asyncio sets TCP_NODELAY only on sockets that it creates. Without this option, each answer takes 40 ms longer,
    # because the kernel waits for a delayed ACK
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def make_server(predictor: Any, limits: Limits, hosts: Any, *, access_log: bool = False) -> Server:
    """Build the HTTP server for a model.

    ``hosts`` are the names that the Host header of a request may contain. If ``access_log`` is True, the server logs
    each request on stderr.
    """
    config = uvicorn.Config(
        create_app(predictor, limits, hosts),
        http=TimedProtocol,
        ws="none",
        log_level="info" if access_log else "warning",
        access_log=access_log,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=CONNECTIONS,
        timeout_keep_alive=int(limits.header_seconds),
        timeout_graceful_shutdown=int(limits.request_seconds) + 1,
    )
    config.header_seconds = limits.header_seconds  # type: ignore[attr-defined]
    return Server(config)
