"""The first call of each loss in a fresh process: with a library of kernels, compiled by numba before, compiled then,
and in torch operations.

``python -m tests.bench first_use`` prints a table and writes a report. Seconds of the clock and of the processor are of
``create_loss`` and one forward and backward pass at 64 rows of 100 classes, after ``import torch``; then processor
seconds of a pass at distributions. Each way of each loss is a process of its own, so that losses share nothing.
Compiling every loss anew takes some minutes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from topk_registry import registry
from topk_registry.registry.discovery import OURS as DISTRIBUTION

REPORT = Path("docs/results/first_use.json")
WAYS = {  # where kernels come from, and what the table calls it
    "library": "library",
    "kept": "numba, kept",
    "torch": "torch operations",
    "compiled": "numba compiles",
}
PROGRAM = """
import json, sys, time, torch
name, rows, classes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
torch.manual_seed(0)
logits, target = torch.randn(rows, classes, requires_grad=True), torch.randint(classes, (rows,))
wall, cpu = time.perf_counter(), time.process_time()
import topk_registry
counts = {"class_counts": list(range(1, classes + 1))}
try:
    loss = topk_registry.create_loss(name)
except (TypeError, ValueError):
    loss = topk_registry.create_loss(name, **counts)
if getattr(loss, "first_change", None) is not None:
    loss.set_epoch(0)
loss(logits, target).backward()
found = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
soft, cpu = torch.softmax(torch.randn(rows, classes), 1), time.process_time()
try:
    loss(logits, soft).backward()
    found["soft"] = time.process_time() - cpu
except (TypeError, ValueError, RuntimeError):  # a loss of class indices alone
    pass
print(json.dumps(found))
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the first call of each loss, each way."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench first_use", description=main.__doc__)
    parser.add_argument("--library", type=Path, help="a library of kernels; default: none, and no such column")
    parser.add_argument("--only", nargs="+", metavar="LOSS", help="losses; default: all of topk-registry")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="default: all")
    parser.add_argument("--repeat", type=int, default=3, help="processes a way, but one where it compiles; default: 3")
    parser.add_argument("--json", type=Path, default=REPORT, help="the report; default: %(default)s")
    args = parser.parse_args(argv)
    losses = [info.name for info in registry.losses.infos() if info.distribution == DISTRIBUTION]
    ways = [way for way in args.ways if way != "library" or args.library]
    report: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.only or losses:
            report[name] = {}
            for way in sorted(ways, key=lambda way: way != "compiled"):  # which leaves what "kept" finds
                report[name][way] = first_call(name, way, Path(folder) / name, args.library, args.repeat)
            args.json.write_text(json.dumps(report, indent=1) + "\n")
            print(" ".join([name, *(f"{way} {report[name][way]['wall']:.2f} s" for way in ways)]), flush=True)
    print(table(report), end="")
    return 0


def first_call(name: str, way: str, folder: Path, library: Path | None, repeat: int) -> dict[str, float]:
    """The shortest of a few first calls, each in a process of its own."""
    environment = {
        **os.environ,
        "NUMBA_CACHE_DIR": str(folder),
        "TOPK_REGISTRY_KERNELS": str(library.resolve()) if way == "library" and library else "compile",
        "TOPK_REGISTRY_BACKEND": "torch" if way == "torch" else "auto",
    }
    command, found = [sys.executable, "-c", PROGRAM, name, "64", "100"], []
    for _ in range(1 if way == "compiled" else repeat):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    return min(found, key=lambda one: one["wall"])


def table(report: dict[str, dict[str, dict[str, float]]]) -> str:
    """The table in docs/speed.md: seconds of the clock, and of the processor where numba compiles."""
    columns = {f"{words}, s": (way, "wall", 2) for way, words in WAYS.items() if way != "compiled"}
    columns["numba compiles, CPU s"] = ("compiled", "cpu", 1)
    columns["then distributions, CPU s"] = ("compiled", "soft", 1)
    some = {words for words, (way, _, _) in columns.items() if any(way in found for found in report.values())}
    header = ["loss", *(words for words in columns if words in some)]
    lines = [header, ["---"] * len(header)]
    for name, found in report.items():
        cells = [(found.get(columns[words][0], {}).get(columns[words][1]), columns[words][2]) for words in header[1:]]
        lines.append([f"`{name}`", *("" if cell is None else f"{cell:.{digits}f}" for cell, digits in cells)])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    raise SystemExit(main())
