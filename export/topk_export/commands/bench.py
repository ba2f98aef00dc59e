"""``topk-registry bench``: time an exported file by batch size and device, or load a running service."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from topk_export.commands.common import command, say
from topk_export.verification.bench import Timing, devices, measure
from topk_registry.cli import ArgumentParser, positive, within

_COLUMNS = ("device", "batch", "runs", "median ms", "p95 ms", "images/s", "head ms", "head share")


@command
def main(argv: Sequence[str]) -> int:
    """Time an exported file and its head's share, or load a service."""
    parser = ArgumentParser(prog="topk-registry bench", description=main.__doc__)
    parser.add_argument("model", metavar="MODEL_OR_URL", help="model.onnx, or http://127.0.0.1:PORT of a service")
    parser.add_argument(
        "--batch-sizes",
        type=positive,
        nargs="+",
        default=(1, 8, 32),
        metavar="N",
        help="images a run (default: 1 8 32)",
    )
    parser.add_argument(
        "--device",
        choices=("all", "cpu", "cuda", "tensorrt"),
        default="all",
        help="where to run (default: all that work)",
    )
    parser.add_argument("--threads", type=positive, metavar="N", help="CPU threads of one run (default: onnxruntime's)")
    parser.add_argument(
        "--seconds", type=within("(0, inf)"), default=3.0, help="most seconds for a row of the table (default: 3)"
    )
    parser.add_argument(
        "--repeats", type=positive, default=200, help="most runs for a row of the table, or requests (default: 200)"
    )
    parser.add_argument("--json", action="store_true", help="print the times as JSON")
    service = parser.add_argument_group("a service on this machine")
    service.add_argument("--concurrency", type=positive, default=8, metavar="N", help="requests at once (default: 8)")
    service.add_argument("--image", type=Path, help="the image to send (default: coloured noise)")
    service.add_argument("--api-key", metavar="KEY", help="a key of the service, where it asks for one")
    args = parser.parse_args(argv)
    if "://" in args.model:
        return _load(args)
    rows: list[Timing] = []
    wanted: list[str] = devices() if args.device == "all" else [args.device]
    sizes: list[int] = list(args.batch_sizes)
    for device, batch in product(wanted, sizes):
        say(f"measuring {device}, batch {batch}")
        timing = measure(
            args.model, device=device, batch=batch, threads=args.threads, seconds=args.seconds, repeats=args.repeats
        )
        if timing is None:
            say(f"skipped: the model's batch size is fixed and is not {batch}")
        else:
            rows.append(timing)
    print(json.dumps([asdict(row) for row in rows], indent=2) if args.json else _table(rows))
    return 0 if rows else 1


def _load(args: Any) -> int:
    from topk_export.serve import loadtest

    result = loadtest.run(
        args.model,
        args.image.read_bytes() if args.image else loadtest.noise_jpeg(),
        requests=args.repeats,
        concurrency=args.concurrency,
        seconds=args.seconds,
        key=args.api_key,
    )
    shown = ((name, f"{value:.2f}" if isinstance(value, float) else value) for name, value in result.items())
    print(json.dumps(result, indent=2) if args.json else "\n".join(f"{name:>10}  {value}" for name, value in shown))
    return 0 if set(result["statuses"]) == {200} else 1


def _table(rows: list[Timing]) -> str:
    cells = [_COLUMNS, *(_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in cells)


def _cells(row: Timing) -> tuple[str, ...]:
    head = ("-", "-") if row.head_ms is None else (f"{row.head_ms:.3f}", f"{row.head_ms / row.median_ms:.2%}")
    figures = (f"{row.median_ms:.3f}", f"{row.p95_ms:.3f}", f"{1e3 * row.batch / row.median_ms:.1f}")
    return (row.device, str(row.batch), str(row.runs), *figures, *head)
