"""A load test of the HTTP service, bounded in requests and in time, against this machine only.

python -m topk_export.serve.loadtest http://127.0.0.1:8000 --requests 200 --concurrency 8 --seconds 10
"""

import http.client
import io
import ipaddress
import json
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from PIL import Image

from topk_registry.cli import ArgumentParser

MAX_REQUESTS, MAX_CONCURRENCY, MAX_SECONDS = 10_000, 64, 120.0


def run(url: str, body: bytes, *, requests: int, concurrency: int, seconds: float) -> dict[str, Any]:
    """Send up to ``requests`` images from ``concurrency`` threads within ``seconds``; what came back, and how fast."""
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
                status, taken = _post(connection, body)
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


def _post(connection: http.client.HTTPConnection, body: bytes) -> tuple[int | str, float]:
    start = time.perf_counter()
    try:
        connection.request("POST", "/predict", body, {"Content-Type": "image/jpeg"})
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


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(prog="python -m topk_export.serve.loadtest", description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--image", type=Path, help="what to send (default: coloured noise)")
    parser.add_argument("--requests", type=int, default=200, help=f"at most this many (default: 200, {MAX_REQUESTS})")
    parser.add_argument("--concurrency", type=int, default=8, help=f"at most {MAX_CONCURRENCY} (default: 8)")
    parser.add_argument("--seconds", type=float, default=10.0, help=f"at most this long (default: 10, {MAX_SECONDS:g})")
    args = parser.parse_args(argv)
    try:
        result = run(
            args.url,
            args.image.read_bytes() if args.image else noise_jpeg(),
            requests=min(args.requests, MAX_REQUESTS),
            concurrency=min(args.concurrency, MAX_CONCURRENCY),
            seconds=min(args.seconds, MAX_SECONDS),
        )
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result, indent=2))
    return 0 if set(result["statuses"]) == {200} else 1


if __name__ == "__main__":
    raise SystemExit(main())
