"""Linear classifiers with very many classes: `linear_smooth_topk` beside `F.linear_cross_entropy` of PyTorch.

Time and peak memory of a training step from features to the gradients of features, weight and bias, contestants in
turns. Memory is that of PyTorch's tensors, with the three gradients and without the layer. `F.linear_cross_entropy`
runs on all logits at once, its default, and in the blocks of rows that its options choose or that are given.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import topk_registry as tr
from tests.bench.gate import green, outcome
from tests.bench.report import aligned, dumps, environment
from topk_studies.timing.memory import peak_bytes
from topk_studies.timing.rounds import CPU, CUDA, Sample, Spread, Step, interleave

OURS, TORCH, ON_LOGITS = "linear_smooth_topk", "F.linear_cross_entropy", "F.cross_entropy on logits"
TESTS = ("tests/nn/test_linear.py", "tests/ops/ksubset/test_linear.py")
HEADER = ("contestant", "forward", "backward", "both, s", "quartiles", "x CE", "GiB", "runs")
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # features [B, d], weight [n, d], bias [n], labels [B]


def contestants(k: int, tau: float, rows: int) -> dict[str, Loss]:
    """All contestants by name; those that this version of PyTorch does not have are left out."""
    on_logits = tr.create_loss("smooth_topk_svm", k=k, tau=tau)
    found: dict[str, Loss] = {
        OURS: lambda x, weight, bias, label: tr.functional.linear_smooth_topk(x, weight, bias, label, k=k, tau=tau),
        "smooth_topk_svm on logits": lambda x, weight, bias, label: on_logits(F.linear(x, weight, bias), label),
        ON_LOGITS: lambda x, weight, bias, label: F.cross_entropy(F.linear(x, weight, bias), label),
    }
    if hasattr(F, "linear_cross_entropy"):
        found[TORCH] = cross_entropy(None)
        found[f"{TORCH}, its blocks"] = cross_entropy(torch.nn.LinearCrossEntropyOptions())
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows, chunking_method=None)
        found[f"{TORCH}, blocks of {rows}"] = cross_entropy(options)
    return found


def cross_entropy(options: Any) -> Loss:
    def loss(features: Tensor, weight: Tensor, bias: Tensor, label: Tensor) -> Tensor:
        return F.linear_cross_entropy(features, weight, label, linear_bias=bias, options=options)

    return loss


def layer(
    B: int, n: int, d: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features, weight and bias as ``nn.Linear`` starts with them, and labels."""
    generator = torch.Generator(device).manual_seed(0)
    features, weight = (torch.randn(rows, d, generator=generator, device=device, dtype=dtype) for rows in (B, n))
    bias, label = features.new_zeros(n), torch.randint(n, (B,), generator=generator, device=device)
    return features.requires_grad_(), weight.mul_(d**-0.5).requires_grad_(), bias.requires_grad_(), label


def step(loss: Loss, tensors: tuple[Tensor, Tensor, Tensor, Tensor]) -> Step:
    """One forward and backward pass, timed each; gradients are allocated anew."""
    clock = CUDA if tensors[0].is_cuda else CPU

    def run() -> Sample:
        start = clock.mark()
        value = loss(*tensors)
        middle = clock.mark()
        value.backward()
        end = clock.mark()
        for t in tensors:
            t.grad = None
        return clock.seconds(start, middle), clock.seconds(middle, end)

    return run


def measure(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor], losses: dict[str, Loss], repeats: int, limit: float
) -> list[dict[str, Any]]:
    """Medians of rounds in turns; a contestant whose steps add up to ``limit`` seconds sits out the others.

    One that fails, for want of memory say, has its ``problem`` in its row.
    """
    (B, d), n = tensors[0].shape, len(tensors[1])
    steps: dict[str, Step] = {}
    peaks: dict[str, int] = {}
    problems: dict[str, str] = {}
    for name, loss in losses.items():
        try:
            run = step(loss, tensors)
            peaks[name] = peak_bytes(run, str(tensors[0].device))  # and warms up
            steps[name] = run
        except Exception as error:  # the others are still to be measured
            problems[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            for t in tensors:
                t.grad = None
    samples: dict[str, list[Sample]] = {name: [] for name in steps}
    interleave(steps, samples, repeats=repeats, limit=limit)
    rows = []
    for name in losses:
        row = {"B": B, "n": n, "d": d, "dtype": str(tensors[0].dtype).removeprefix("torch."), "contestant": name}
        if name in steps:
            taken = samples[name]
            forward, backward, both = (Spread.of(list(t)) for t in (*zip(*taken, strict=True), map(sum, taken)))
            row |= {"forward": forward.median, "backward": backward.median, "both": both.median}
            row |= {"q1": both.q1, "q3": both.q3, "bytes": peaks[name], "repeats": len(taken)}
        rows.append({**row, "problem": problems.get(name, "")})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows beside PyTorch's cross-entropy: without logits where this version has that, else on logits."""
    times = {row["contestant"]: row["both"] for row in rows if not row["problem"]}
    peer = times.get(TORCH) or times.get(ON_LOGITS)
    lines: list[tuple[str, ...]] = [HEADER]
    for row in rows:
        if row["problem"]:
            continue
        parts = [f"{row[part]:.3g}" for part in ("forward", "backward", "both")]
        ratio = f"{row['both'] / peer:.2f}" if peer else ""
        spread = f"{row['q1']:.3g}-{row['q3']:.3g}"
        lines.append((row["contestant"], *parts, spread, ratio, f"{row['bytes'] / 2**30:.3f}", str(row["repeats"])))
    problems = [f"{row['contestant']}: {row['problem']}" for row in rows if row["problem"]]
    return "\n".join([*aligned(lines), *problems])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench linear", description=__doc__)
    parser.add_argument("--classes", type=int, nargs="+", default=[100_000])
    parser.add_argument("--features", type=int, default=256)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("-k", type=int, default=5)
    parser.add_argument("--tau", type=float, default=1.0)
    parser.add_argument("--rows", type=int, default=32, help="rows of a block of one of the contestants")
    parser.add_argument("--repeats", type=int, default=11, help="rounds over all contestants")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds a contestant may take at one case")
    parser.add_argument("--threads", type=int, help="threads of PyTorch (default: its own choice)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--junit", type=Path, metavar="FILE", help="the tests' own report, instead of running them")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="contestants whose names begin with one of these")
    parser.add_argument("--json", type=Path, help="write environment and results to this file")
    args = parser.parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    if not args.junit and not green(TESTS):
        return 1
    losses = contestants(args.k, args.tau, args.rows)
    if args.only:
        losses = {name: loss for name, loss in losses.items() if name.startswith(tuple(args.only))}
    tests = {"tests": outcome(args.junit)} if args.junit else {}
    report: dict[str, Any] = {"environment": environment(args.device), **tests, "results": (results := [])}
    for n in args.classes:
        tensors = layer(args.batch, n, args.features, args.device, getattr(torch, args.dtype))
        rows = measure(tensors, losses, args.repeats, args.limit)
        results += rows
        print(f"B = {args.batch}, n = {n}, d = {args.features}\n{table(rows)}\n", flush=True)
        if args.json:
            args.json.write_text(dumps(report))
    return 0
