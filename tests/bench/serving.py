"""Load ``topk-registry serve`` with requests, by number of workers and of clients.

    python -m tests.bench serving model.onnx --workers 1 2 --clients 1 4 16

For each number of workers a service is started on this machine; each number of clients sends the same JPEG again and
again, one request after the other, first to warm the service up and then for ``--seconds``. Clients and service share
the processors, so that on a small machine the clients' own work, one process in Python, is part of what is measured.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.export.serve.service import Service
from topk_export.serve import loadtest

WARM = 32  # requests before the clock starts: each worker has run batches of several sizes
MOST = 1000  # clients and requests that a worker lets wait: all that are sent here


def main(argv: Sequence[str] | None = None) -> int:
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m tests.bench serving", description=about)
    parser.add_argument("model", type=Path, help="an exported file, such as that of resnet18")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], metavar="N")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16], metavar="N")
    parser.add_argument("--seconds", type=float, default=15.0, metavar="S", help="of each row (default: 15)")
    parser.add_argument("--size", type=int, default=256, help="pixels of a side of the JPEG (default: 256)")
    args = parser.parse_args(argv)
    body = loadtest.noise_jpeg(args.size)
    print("workers\tclients\tanswers\tanswers/s\tp50 ms\tp95 ms\tp99 ms\tother statuses")
    with tempfile.TemporaryDirectory() as folder:
        for workers in args.workers:
            flags = ("--workers", workers, "--max-queue", MOST, "--max-per-client", MOST, "--device", "cpu")
            with Service(args.model, Path(folder) / f"{workers}.log", *map(str, flags)) as service:
                for clients in args.clients:
                    loadtest.run(service.url, body, requests=WARM, concurrency=clients, seconds=60)
                    _tell(workers, clients, service.url, body, args.seconds)
    return 0


def _tell(workers: int, clients: int, url: str, body: bytes, seconds: float) -> None:
    found = loadtest.run(url, body, requests=loadtest.MAX_REQUESTS, concurrency=clients, seconds=seconds)
    others = {status: count for status, count in found["statuses"].items() if status != 200}
    good = found["statuses"].get(200, 0)
    times = (f"{found[name]:.1f}" for name in ("p50_ms", "p95_ms", "p99_ms"))
    print(workers, clients, good, f"{good / found['seconds']:.1f}", *times, others or "none", sep="\t", flush=True)
