"""Put a service under the loads that once took it down, and print what its clients see.

    python -m tests.bench trials [--seconds 10] [--json FILE]

The service is ``topk-registry serve`` on this machine, with a small model of 21841 classes; clients are threads of this
process. Each trial is bounded in time. On a busy machine only the order of magnitude means anything.
"""

import argparse
import contextlib
import io
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from tests.bench.report import dumps, environment
from tests.export.serve.service import Service, predict, request
from topk_export import Predictor

CLASSES, SOCKETS, CLIENTS = 21841, 512, 4
SIDE = 7900  # 62 megapixels: 182 KB as a PNG of one colour
PAUSE = 0.05  # seconds between requests of a client that only watches
COLUMNS = ("per_second", "p50_ms", "p95_ms", "max_ms")


@dataclass
class Seen:
    """What one kind of client saw: statuses of answers, and the seconds that each took."""

    trial: str
    client: str
    statuses: Counter[int] = field(default_factory=Counter)
    times: list[float] = field(default_factory=list)
    seconds: float = 0.0
    note: str = ""

    def figures(self) -> dict[str, object]:
        """All of it as JSON."""
        quantiles = {"p50_ms": 0.5, "p95_ms": 0.95, "max_ms": 1.0} if self.times else {}
        return {
            "trial": self.trial,
            "client": self.client,
            "statuses": {str(status): count for status, count in sorted(self.statuses.items())},
            "per_second": sum(self.statuses.values()) / self.seconds,
            **{name: 1e3 * float(np.quantile(self.times, q)) for name, q in quantiles.items()},
            "note": self.note,
        }


@dataclass(frozen=True)
class Client:
    """A question that ``count`` threads ask again and again, with a pause in between; it returns a status."""

    name: str
    ask: Callable[[], int]
    count: int = 1
    pause: float = 0.0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench trials", description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, metavar="S", help="length of a trial (default: 10)")
    parser.add_argument("--json", type=Path, help="write environment and figures to this file")
    args = parser.parse_args(argv)
    found = environment("cpu")
    if found["busy"]:
        print(f"the machine is busy ({found['busy']})", file=sys.stderr)
    print(f"{'trial':30}  {'client':40}  {'  '.join(f'{name:>8}' for name in COLUMNS)}  answers by status")
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        for seen in trials(_model(Path(folder)), Path(folder), args.seconds):
            rows.append(seen.figures())
            print(_line(seen), flush=True)
    if args.json:
        settings = {"seconds": args.seconds, "classes": CLASSES, "sockets": SOCKETS, "clients": CLIENTS, "side": SIDE}
        args.json.write_text(dumps({"environment": found, "settings": settings, "results": rows}))
    return 0


def trials(model: Path, folder: Path, seconds: float, *, sockets: int = SOCKETS, side: int = SIDE) -> Iterator[Seen]:
    """Run all trials, one after the other; what each saw is yielded at once."""
    small, large = photo(), flat_png(side)
    with Service(model, folder / "log") as service:
        yield from idle_sockets(service.port, small, seconds, sockets)
        yield from whole_sets(service.port, small, seconds)
        yield from large_image_refused(service.port, large, side)
    with Service(model, folder / "log", "--max-pixels", str(2 * side * side)) as service:
        yield from large_images(service.port, small, large, seconds)
    yield from decoding(model, small, seconds)


def idle_sockets(port: int, image: bytes, seconds: float, count: int) -> Iterator[Seen]:
    """Sockets that send nothing; the health and predictions of other clients meanwhile."""
    title = f"{count} idle sockets"
    with contextlib.ExitStack() as stack:
        began = time.perf_counter()
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 20)) for _ in range(count)]
        clients = [_health(port), Client("/predict", lambda: predict(port, image)[0])]
        seen = _together(title, seconds, clients)
        closed = sum(_is_closed(each) for each in silent)
        seen[0].note = f"{closed} of them closed after {time.perf_counter() - began:.1f} s"
    yield from seen


def whole_sets(port: int, image: bytes, seconds: float) -> Iterator[Seen]:
    """Clients that ask for the set of all of the softmax, over very many classes."""
    query = "?softmax_mass=1&max_set=1000"
    asking = Client(f"{CLIENTS} x /predict{query}", lambda: predict(port, image, query=query)[0], CLIENTS)
    yield from _together(f"n = {CLASSES}, whole sets", seconds, [_health(port), asking])


def large_image_refused(port: int, image: bytes, side: int) -> Iterator[Seen]:
    """One image of more pixels than a service takes by default."""
    seen = Seen("one large PNG, default limits", f"{len(image) // 1000} KB, {side} x {side}")
    _ask(seen, lambda: predict(port, image)[0])
    seen.seconds = seen.times[0]
    yield seen


def large_images(port: int, small: bytes, large: bytes, seconds: float) -> Iterator[Seen]:
    """Small images alone, then while others send large ones that the service was told to take."""
    clients = [_health(port), Client("small image", lambda: predict(port, small)[0])]
    yield from _together("small images alone", seconds, clients)
    senders = Client(f"{CLIENTS} x large image", lambda: predict(port, large)[0], CLIENTS)
    yield from _together("small images beside large ones", seconds, [*clients, senders])


def decoding(model: Path, image: bytes, seconds: float) -> Iterator[Seen]:
    """Images that one process reads, decodes, resizes and runs."""
    for workers in (1, 2, 4):
        predictor = Predictor(model, device="cpu", threads=1, workers=workers)
        began = time.perf_counter()
        count = sum(1 for _ in predictor.stream(_until(began + seconds, image)))
        took = time.perf_counter() - began
        yield Seen("decoding, one process", f"{workers} threads", Counter({200: count}), seconds=took)


def _until(end: float, image: bytes) -> Iterator[bytes]:
    yield image  # one at least, however busy the machine is
    while time.perf_counter() < end:
        yield image


def _together(title: str, seconds: float, clients: Sequence[Client]) -> list[Seen]:
    """Let all clients ask again and again at once; a request in progress at the end is waited for."""
    began = time.perf_counter()
    seen = [Seen(title, client.name) for client in clients]

    def work(client: Client, own: Seen) -> None:
        _ask(own, client.ask)  # once at least, however busy the machine is
        while time.perf_counter() < began + seconds:
            time.sleep(client.pause)
            _ask(own, client.ask)
        own.seconds = time.perf_counter() - began

    threads = [
        threading.Thread(target=work, args=pair)
        for pair in zip(clients, seen, strict=True)
        for _ in range(pair[0].count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seen


def _ask(seen: Seen, question: Callable[[], int]) -> None:
    start = time.perf_counter()
    try:
        status = question()
    except OSError:
        status = 0  # no answer
    with _lock:
        seen.times.append(time.perf_counter() - start)
        seen.statuses[status] += 1


_lock = threading.Lock()


def _health(port: int) -> Client:
    return Client("/healthz", lambda: request(port, "GET", "/healthz")[0], pause=PAUSE)


def _is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _line(seen: Seen) -> str:
    found = seen.figures()
    statuses = ", ".join(f"{count} x {status}" for status, count in seen.statuses.items())
    figures = (found.get(name) for name in COLUMNS)
    numbers = "  ".join(f"{value:8.1f}" if isinstance(value, float) else " " * 8 for value in figures)
    return f"{seen.trial:30}  {seen.client:40}  {numbers}  {statuses}  {seen.note}".rstrip()


def _model(folder: Path) -> Path:
    from tests.export.conftest import NORMAL, tiny
    from topk_export import export_onnx

    config = {"input_size": (3, 224, 224), "crop_pct": 0.875, "interpolation": "bicubic", **NORMAL}
    return export_onnx(tiny(CLASSES), folder / "model.onnx", k=5, verify=False, data_config=config)


def photo(width: int = 500, height: int = 375) -> bytes:
    """Encode an image of the size of ImageNet's, with edges and noise."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (-(-height // 16), -(-width // 16), 3)).repeat(16, 0).repeat(16, 1)[:height, :width]
    pixels = np.clip(blocks + rng.normal(0, 8, blocks.shape), 0, 255).astype(np.uint8)
    return _encoded(Image.fromarray(pixels), "JPEG")


def flat_png(side: int) -> bytes:
    return _encoded(Image.new("RGB", (side, side)), "PNG")


def _encoded(image: Image.Image, kind: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()
