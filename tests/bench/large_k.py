"""Losses of a soft top-k at small and large k: what grows with k, and what does not.

Processor time of a forward and a backward pass on one thread, so that other processes count little: medians of rounds
over all losses, at class indices and standard normal logits.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import topk_registry as tr
from tests.bench.report import dumps, environment

NAMES = ("soft_topk", "lapsum", "smooth_topk_svm")
CASES = tuple(product((64, 256), (1000, 10_000), (5, 50, 500)))
SLOW = 1.0  # seconds of a call, from which on three calls must do


def seconds(loss: Any, logits: Tensor, target: Tensor) -> float:
    logits.grad = None
    start = time.process_time()
    loss(logits, target).backward()
    return time.process_time() - start


def measure(B: int, n: int, k: int, rounds: int) -> dict[str, list[float]]:
    """Processor seconds of each loss and of cross-entropy, one number a round."""
    g = torch.Generator().manual_seed(0)
    logits, target = torch.randn(B, n, generator=g).requires_grad_(), torch.randint(n, (B,), generator=g)
    losses = {"F.cross_entropy": F.cross_entropy} | {name: tr.create_loss(name, k=k) for name in NAMES}
    first = {name: [seconds(loss, logits, target) for _ in range(2)][1] for name, loss in losses.items()}
    found: dict[str, list[float]] = {name: [] for name in losses}
    for turn in range(rounds):
        for name, loss in losses.items():
            if first[name] < SLOW or turn < 3:
                found[name].append(seconds(loss, logits, target))
    return found


def table(report: dict[str, Any]) -> str:
    """The report as a table of milliseconds, for docs/speed.md."""
    names = ("F.cross_entropy", *NAMES)
    lines = [["B x n", "k", *(f"`{name}`, ms" for name in names)], ["---"] * (2 + len(names))]
    for row in report["results"]:
        cells = (f"{1000 * statistics.median(row['seconds'][name]):.2g}" for name in names)
        lines.append([f"{row['B']} x {row['n']}", str(row["k"]), *(f"{float(cell):g}" for cell in cells)])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.large_k", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write environment and results to this file")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    report: dict[str, Any] = {"environment": environment("cpu"), "results": []}
    for B, n, k in CASES:
        report["results"].append({"B": B, "n": n, "k": k, "seconds": measure(B, n, k, args.rounds)})
        print(f"{B} x {n}, k = {k}", file=sys.stderr)
        if args.json:
            args.json.write_text(dumps(report))
    print(table(json.loads(json.dumps(report))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
