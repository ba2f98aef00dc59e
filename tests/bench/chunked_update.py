"""Whole training steps of a classifier with very many classes: time and peak memory with AdamW, contestants in turns.

``python -m tests.bench chunked_update --classes 100000 1000000``. Each contestant runs in a process of its own, from
features to the changed weights, with cross-entropy. Memory is the most that the process held resident beyond what it
held before the layer was made: weights, gradients, the optimizer's states and all else. The first step of a process,
which makes the states, is not timed. Times are the least of all steps. Processor seconds are those of all threads. They
change little on one thread where other work shares the machine; several threads wait for each other, and that counts.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.bench.gate import green
from tests.bench.report import aligned, dumps, environment
from tests.linear_peak import memory
from topk_registry import ChunkedUpdate, LinearSmoothTopK

TORCH, PLAIN, OURS = "F.linear_cross_entropy", "LinearSmoothTopK", "ChunkedUpdate"
CONTESTANTS: dict[str, dict[str, Any]] = {
    f"{TORCH}, AdamW": {"loss": TORCH},
    f"{TORCH}, AdamW(fused=True)": {"loss": TORCH, "fused": True},
    f"{PLAIN}, AdamW": {},
    f"{PLAIN}, AdamW(fused=True)": {"fused": True},
    f"{OURS}, float32": {"state": "float32"},
    f"{OURS}, bfloat16": {"state": "bfloat16"},
    f"{OURS}, int8": {"state": "int8"},
    f"{OURS}, int8, bfloat16 weight": {"state": "int8", "dtype": "bfloat16"},
    f"{OURS}, int8, in the step": {"state": "int8", "when": "step"},
}
HEADER = ("contestant", "GiB", "x torch", "seconds", "x torch", "processor s", "x torch", "steps")
TESTS = ("tests/nn/test_chunked_update.py",)


def prepare(name: str, n: int, d: int, B: int) -> Callable[[], float]:
    """A training step of a contestant; returns the loss."""
    settings = CONTESTANTS[name]
    torch.manual_seed(0)
    head = LinearSmoothTopK(d, n, k=1, tau=1.0, alpha=0.0)
    if "dtype" in settings:
        head.weight = torch.nn.Parameter(head.weight.detach().to(getattr(torch, settings["dtype"])))
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3, fused=settings.get("fused"))
    if "state" in settings:
        ChunkedUpdate(optimizer, head, state=settings["state"], when=settings.get("when", "backward"))

    def loss(features: Tensor, target: Tensor) -> Tensor:
        if settings.get("loss") == TORCH:
            return F.linear_cross_entropy(features, head.weight, target, linear_bias=head.bias)
        return head(features, target)

    def step() -> float:
        features, target = torch.randn(B, d, requires_grad=True), torch.randint(n, (B,))
        value = loss(features, target)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.item()

    return step


def child(name: str, n: int, d: int, B: int, steps: int) -> dict[str, Any]:
    """Figures of a contestant, in a process that runs nothing else."""
    small = prepare(name, 2000, d, B)
    for _ in range(2):  # what is loaded and compiled once
        small()
    Path("/proc/self/clear_refs").write_text("5")  # forget the most so far
    before = memory("VmRSS")
    step, wall, processor, value = prepare(name, n, d, B), [], [], 0.0
    for number in range(steps + 1):
        start = time.perf_counter(), time.process_time()
        value = step()
        if number:
            wall.append(time.perf_counter() - start[0])
            processor.append(time.process_time() - start[1])
    return {"bytes": memory("VmHWM") - before, "seconds": wall, "processor": processor, "loss": value}


def measured(name: str, args: argparse.Namespace, n: int) -> dict[str, Any]:
    """Figures of a contestant from a new process, or its problem."""
    numbers = [str(each) for each in (n, args.features, args.batch, args.steps, args.threads)]
    call = [sys.executable, "-m", "tests.bench.chunked_update", "--child", name, *numbers]
    done = subprocess.run(call, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return {"problem": lines[-1]}
    return json.loads(done.stdout)


def table(rows: list[dict[str, Any]]) -> str:
    """Memory and least times of each contestant, and their ratio to those of PyTorch's own with plain AdamW."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if "problem" not in row:
            found.setdefault(row["contestant"], []).append(row)
    peer, lines = next(iter(CONTESTANTS)), [HEADER]
    figures = {
        name: (
            median(row["bytes"] for row in runs) / 2**30,
            *(min(one for row in runs for one in row[part]) for part in ("seconds", "processor")),
        )
        for name, runs in found.items()
    }
    for name, own in figures.items():
        ratios = [f"{a / b:.2f}" for a, b in zip(own, figures[peer], strict=True)] if peer in figures else [""] * 3
        columns = [text for a, ratio in zip(own, ratios, strict=True) for text in (f"{a:.2f}", ratio)]
        lines.append((name, *columns, str(sum(len(row["seconds"]) for row in found[name]))))
    problems = [f"{row['contestant']}: {row['problem']}" for row in rows if "problem" in row]
    return "\n".join([*aligned(lines), *problems])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench chunked_update", description=__doc__)
    parser.add_argument("--classes", type=int, nargs="+", default=[100_000])
    parser.add_argument("--features", type=int, default=256)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a process")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each contestant")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", nargs="+", metavar="NAME", help="contestants whose names begin with one of these")
    parser.add_argument("--untested", action="store_true", help="do not run the tests first")
    parser.add_argument("--json", type=Path, help="write environment and results to this file")
    parser.add_argument("--child", nargs=6, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        name, *numbers = args.child
        n, d, B, steps, threads = map(int, numbers)
        torch.set_num_threads(threads)
        print(json.dumps(child(name, n, d, B, steps)))
        return 0
    if not args.untested and not green(TESTS):
        return 1
    names = [name for name in CONTESTANTS if not args.only or name.startswith(tuple(args.only))]
    report: dict[str, Any] = {"environment": environment("cpu"), "results": (results := [])}
    for n in args.classes:
        about = {"n": n, "d": args.features, "B": args.batch, "threads": args.threads}
        for turn in range(args.rounds):
            for name in names:
                print(
                    f"\r{n} classes, round {turn + 1} of {args.rounds}: {name:50}", end="", file=sys.stderr, flush=True
                )
                results.append({**about, "contestant": name, **measured(name, args, n)})
                if args.json:
                    args.json.write_text(dumps(report))
        print("", file=sys.stderr)
        rows = [row for row in results if row["n"] == n]
        print(f"B = {args.batch}, n = {n}, d = {args.features}\n{table(rows)}\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
