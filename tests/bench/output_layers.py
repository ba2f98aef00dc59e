"""Time and memory of a training step of output layers with very many classes, side by side.

``python -m tests.bench.output_layers --classes 100000 --features 128``. Contestants take turns within a round; each
step is a forward pass, a backward pass and plain SGD on the layer.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import topk_registry as tr
from tests.bench.gate import green
from tests.bench.report import dumps, environment
from topk_registry import SphericalLinear
from topk_studies.timing.memory import peak_bytes
from topk_studies.timing.rounds import Spread

RATE, NEGATIVES = 0.01, 1024
OURS = "SphericalLinear"
TESTS = ("tests/nn/spherical/test_layer.py",)
LINE = "{n:>9} x {d:<4} {contestant:<28} {seconds:10.5f} s {x ours:8.2f} x ours {bytes:>13} bytes"
Step = Callable[[Tensor, Tensor], None]


def spherical(d: int, n: int) -> Step:
    layer = SphericalLinear(d, n, loss="log_taylor_softmax")

    def step(features: Tensor, target: Tensor) -> None:
        layer(features, target).backward()
        layer.step(RATE)

    return step


def dense(name: str) -> Callable[[int, int], Step]:
    def make(d: int, n: int) -> Step:
        layer, loss = nn.Linear(d, n, bias=False), tr.create_loss(name)
        return _with_sgd(layer, lambda features, target: loss(layer(features), target))

    return make


def adaptive(d: int, n: int) -> Step:
    # head of 2000 classes and two clusters, as in the layer's documentation, scaled to n
    layer = nn.AdaptiveLogSoftmaxWithLoss(d, n, cutoffs=[min(2000, n // 5), n // 5 + 1])
    return _with_sgd(layer, lambda features, target: layer(features, target).loss)


def sampled(d: int, n: int) -> Step:
    """Softmax over the labels and a few uniform negatives, on the rows of those alone."""
    weight = nn.init.uniform_(torch.empty(n, d), -(d**-0.5), d**-0.5)

    def step(features: Tensor, target: Tensor) -> None:
        classes = torch.cat((target, torch.randint(n, (NEGATIVES,))))
        rows = weight[classes].requires_grad_()
        F.cross_entropy(features @ rows.T, torch.arange(len(target))).backward()
        assert rows.grad is not None
        weight.index_add_(0, classes, rows.grad, alpha=-RATE)

    return step


def _with_sgd(layer: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> Step:
    sgd = torch.optim.SGD(layer.parameters(), lr=RATE)

    def step(features: Tensor, target: Tensor) -> None:
        sgd.zero_grad()
        loss(features, target).backward()
        sgd.step()

    return step


CONTESTANTS: dict[str, Callable[[int, int], Step]] = {
    OURS: spherical,
    "dense, log_taylor_softmax": dense("log_taylor_softmax"),
    "dense, ce": dense("ce"),
    "AdaptiveLogSoftmaxWithLoss": adaptive,
    f"sampled softmax, {NEGATIVES}": sampled,
}


def measure(names: Sequence[str], n: int, d: int, batch: int, rounds: int, limit: float) -> list[dict[str, object]]:
    """Medians of the rounds; a contestant whose steps add up to ``limit`` seconds sits out the others."""
    steps = {name: CONTESTANTS[name](d, n) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    peaks = {}
    for name, step in steps.items():
        peaks[name] = peak_bytes(lambda step=step: step(*_batch(n, d, batch)))
    for _ in range(rounds):
        for name, step in steps.items():
            if sum(seconds[name]) < limit:
                given = _batch(n, d, batch)
                start = time.perf_counter()
                step(*given)
                seconds[name].append(time.perf_counter() - start)
    ours = Spread.of(seconds[OURS]).median
    rows = []
    for name in steps:
        spread = Spread.of(seconds[name])
        row = {"contestant": name, "n": n, "d": d, "batch": batch, "seconds": spread.median, "q1": spread.q1}
        rows.append(
            row | {"q3": spread.q3, "x ours": spread.median / ours, "bytes": peaks[name], "rounds": len(seconds[name])}
        )
    return rows


def _batch(n: int, d: int, batch: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, d, requires_grad=True), torch.randint(n, (batch,))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--classes", type=int, nargs="+", default=[1000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--features", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--without", nargs="+", default=[], choices=list(CONTESTANTS)[1:], metavar="NAME")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--limit", type=float, default=4.0, help="seconds a contestant may take at one case")
    parser.add_argument("--threads", type=int, help="threads of PyTorch (default: its own choice)")
    parser.add_argument("--json", type=Path, help="write environment and results to this file")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if not green(TESTS):
        return 1
    report: dict[str, object] = {"environment": environment("cpu"), "results": (results := [])}
    names = [name for name in CONTESTANTS if name not in args.without]
    for d in args.features:
        for n in args.classes:
            for row in measure(names, n, d, args.batch, args.rounds, args.limit):
                results.append(row)
                print(LINE.format_map(row), flush=True)
            if args.json:
                args.json.write_text(dumps(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
