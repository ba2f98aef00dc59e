"""HTTP server that runs the application until the process receives SIGTERM or SIGINT."""

import socket
from collections.abc import Sequence
from typing import Any

import uvicorn

from topk_export.serve.app import create_app
from topk_export.serve.reading import Limits

CONNECTIONS = 1000
IDLE_SECONDS = 15  # a connection without a request is closed after this time


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


def make_server(predictor: Any, limits: Limits, hosts: Sequence[str], *, access_log: bool = False) -> uvicorn.Server:
    """Build the HTTP server for a model.

    ``hosts`` are the names that the Host header of a request may contain. If ``access_log`` is True, the server logs
    each request on stderr.
    """
    config = uvicorn.Config(
        create_app(predictor, limits, hosts),
        http="h11",
        ws="none",
        log_level="info" if access_log else "warning",
        access_log=access_log,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=CONNECTIONS,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=int(limits.request_seconds) + 1,
    )
    return uvicorn.Server(config)
