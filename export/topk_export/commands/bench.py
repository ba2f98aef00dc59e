"""``topk-registry bench``: latency and throughput by batch size and provider, and the head's share of them."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product

from topk_export.commands.common import command, say
from topk_export.verification.bench import Timing, devices, measure
from topk_registry.cli import ArgumentParser, positive

_COLUMNS = ("device", "batch", "runs", "median ms", "p95 ms", "images/s", "head ms", "head share")


@command
def main(argv: Sequence[str]) -> int:
    """Time an exported file and its head's share."""
    parser = ArgumentParser(prog="topk-registry bench", description=__doc__)
    parser.add_argument("model", metavar="model.onnx")
    parser.add_argument("--batch-sizes", type=positive, nargs="+", default=(1, 8, 32), metavar="N")
    parser.add_argument("--device", choices=("all", "cpu", "cuda", "tensorrt"), default="all")
    parser.add_argument("--threads", type=positive, metavar="N", help="CPU threads of one run")
    parser.add_argument("--seconds", type=float, default=3.0, help="at most this long a row (default: 3)")
    parser.add_argument("--repeats", type=positive, default=200, help="at most this many runs a row (default: 200)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
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


def _table(rows: list[Timing]) -> str:
    cells = [_COLUMNS, *(_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in cells)


def _cells(row: Timing) -> tuple[str, ...]:
    head = ("-", "-") if row.head_ms is None else (f"{row.head_ms:.3f}", f"{row.head_ms / row.median_ms:.2%}")
    figures = (f"{row.median_ms:.3f}", f"{row.p95_ms:.3f}", f"{1e3 * row.batch / row.median_ms:.1f}")
    return (row.device, str(row.batch), str(row.runs), *figures, *head)
