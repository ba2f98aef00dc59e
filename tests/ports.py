"""Ports for servers that take a while until they listen."""

import os
import socket
from contextlib import suppress


def free_port() -> int:
    """A port that is free, and that the system gives to nobody unasked: it is below those that it gives out itself."""
    for port in range(20_000 + os.getpid() % 10_000, 32_000):
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")
