"""Connections that do nothing: closed after a time, and at once where a new one needs their place."""

import asyncio
from collections.abc import Iterable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from topk_export.serve.limits import Limits


class Connections:
    """The open connections of one process.

    Args:
        limits: how many there may be, and how long one may be idle.
        shared: addresses of proxies, whose connections belong to many clients.
    """

    def __init__(self, limits: Limits, shared: Iterable[str] = ()) -> None:
        self._limits, self._shared = limits, frozenset(shared)
        self._open: dict[WatchedProtocol, None] = {}  # a set that keeps the order of arrival
        self._timer: asyncio.TimerHandle | None = None

    def add(self, connection: "WatchedProtocol") -> None:
        """Count a new connection, and close the one that has been idle longest where there are too many."""
        same = [c for c in self._open if c.address == connection.address]
        if len(same) >= self._limits.client_connections and connection.address not in self._shared:
            _close_longest_idle(same)
        elif len(self._open) >= self._limits.connections:
            _close_longest_idle(self._open)
        self._open[connection] = None
        if self._timer is None:
            self._sweep()

    def discard(self, connection: "WatchedProtocol") -> None:
        self._open.pop(connection, None)

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        oldest = loop.time() - self._limits.idle_seconds
        for connection in [c for c in self._open if not c.busy and c.idle_since <= oldest]:
            connection.close()
        step = min(1.0, self._limits.idle_seconds / 4)
        self._timer = loop.call_later(step, self._sweep) if self._open else None


def _close_longest_idle(connections: Iterable["WatchedProtocol"]) -> None:
    idle = [c for c in connections if not c.busy]
    if idle:
        min(idle, key=lambda c: c.idle_since).close()


class WatchedProtocol(H11Protocol):
    """HTTP/1.1 of uvicorn by h11, which bounds the length of a header, on a connection that is watched.

    A connection is busy from a complete request header to the end of its answer, and idle otherwise. The configuration
    that uvicorn hands over must have an attribute ``watch``, the :class:`Connections` of the process.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._watch: Connections = config.watch
        self._inner: Any = self.app
        self.app = self._answer
        self.busy = 0
        self.idle_since = 0.0
        self.address = ""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self.idle_since = self.loop.time()
        self._watch.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch.discard(self)
        super().connection_lost(exc)

    def close(self) -> None:
        self._watch.discard(self)
        self.transport.close()

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        self.busy += 1
        try:
            await self._inner(scope, receive, send)
        finally:
            self.busy -= 1
            self.idle_since = self.loop.time()
