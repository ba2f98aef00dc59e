"""A load test of the HTTP service, bounded in requests and in time, against this machine only."""

import http.client
import io
import ipaddress
import socket
import threading
import time
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from PIL import Image

MAX_REQUESTS, MAX_CONCURRENCY, MAX_SECONDS = 10_000, 64, 120.0


def run(
    url: str, body: bytes, *, requests: int, concurrency: int, seconds: float, key: str | None = None
) -> dict[str, Any]:
    """Send up to ``requests`` images from ``concurrency`` threads within ``seconds``; return statuses and times."""
    requests, concurrency = min(requests, MAX_REQUESTS), min(concurrency, MAX_CONCURRENCY)
    seconds = min(seconds, MAX_SECONDS)
    headers = {"Content-Type": "application/octet-stream"} | ({} if key is None else {"X-API-Key": key})
    host, port = _loopback(url)
    lock, statuses, times = threading.Lock(), Counter(), []
    start = time.perf_counter()
    left = iter(range(requests))

    def client() -> None:
        connection = http.client.HTTPConnection(host, port, timeout=seconds)
        try:
            while time.perf_counter() - start < seconds:
                with lock:
                    if next(left, None) is None:
                        return
                status, taken = _post(connection, body, headers)
                with lock:
                    statuses[status] += 1
                    times.append(taken)
        finally:
            connection.close()

    threads = [threading.Thread(target=client) for _ in range(concurrency)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall = time.perf_counter() - start
    quantiles = np.quantile(times, (0.5, 0.95, 0.99)) if times else [float("nan")] * 3
    names = ("p50_ms", "p95_ms", "p99_ms")
    return {
        "requests": len(times),
        "statuses": dict(statuses),
        "seconds": wall,
        "per_second": len(times) / wall,
        **{name: 1e3 * float(q) for name, q in zip(names, quantiles, strict=True)},
    }


def _post(connection: http.client.HTTPConnection, body: bytes, headers: dict[str, str]) -> tuple[int | str, float]:
    start = time.perf_counter()
    try:
        connection.request("POST", "/predict", body, headers)
        response = connection.getresponse()
        response.read()
        status: int | str = response.status
    except (OSError, http.client.HTTPException) as error:
        connection.close()
        status = type(error).__name__
    return status, time.perf_counter() - start


def _loopback(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None:
        raise ValueError(f"expected http://127.0.0.1:PORT, got {url!r}")
    address = socket.gethostbyname(parts.hostname)
    if not ipaddress.ip_address(address).is_loopback:
        raise ValueError(f"{parts.hostname} is not this machine: a load test runs on loopback only")
    return address, parts.port or 80


def noise_jpeg(size: int = 256) -> bytes:
    """An image to send: coloured noise."""
    pixels = np.random.default_rng(0).integers(0, 256, (size // 8, size // 8, 3), np.uint8).repeat(8, 0).repeat(8, 1)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG")
    return buffer.getvalue()
