"""Training steps of whole networks, and the share of each step that is the loss's, forward and backward.

    python -m tests.bench steps --models resnet50 vit_base_patch16_224 --device cuda --json FILE

A step is what `timm train --amp --amp-dtype bfloat16 --mixup 0.8 --smoothing 0.1` does on one batch that is in memory:
the network under autocast, the loss of mixed and smoothed targets, the backward pass, and SGD with momentum. Targets
come as the trainer gives them: as labels with shares to the losses that take them, as distributions to the others. The
backward pass is cut at the logits, so that both parts of the loss are timed inside the step.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn
from tqdm import tqdm

from tests.bench.gate import green, outcome
from tests.bench.operators.losses import OPTIONS, long_tail, names_of_ours
from tests.bench.report import aligned, dumps, environment
from topk_registry.ops.targets.label_mixture import LabelMixture
from topk_registry.train.setup.loss import Context, LossSpec
from topk_registry.train.setup.rehearsal import Rehearsal
from topk_studies.timing.contest import CROSS_ENTROPY
from topk_studies.timing.rounds import CPU, CUDA, Sample, Spread, Step, interleave

TESTS = ("tests/losses", "tests/plugins")
SMOOTHING, LAM = 0.1, 0.7
HEADER = ("model", "loss", "step, ms", "loss, ms", "share", "runs")


class Timed(nn.Module):
    """A loss whose two passes are marked on the clock; the gradient of the logits is handed on."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, logits: Tensor, target: Any, mark: Callable[[], Any]) -> tuple[list[Any], Tensor]:
        leaf = logits.detach().requires_grad_()
        marks = [mark()]
        self.loss(leaf, target).backward()
        marks.append(mark())
        assert leaf.grad is not None
        return marks, leaf.grad


def batch(n: int, B: int, size: int, device: str) -> tuple[Tensor, LabelMixture]:
    """Images that are mixed already, and their targets."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(B, 3, size, size, generator=generator).to(device, memory_format=torch.channels_last)
    label = torch.randint(n, (B,), generator=generator).to(device)
    return images, LabelMixture.mixed(label, label.flip(0), LAM, SMOOTHING)


def network(name: str, n: int, size: int, device: str) -> nn.Module:
    options = {"img_size": size} if name.startswith("vit") else {}
    return timm.create_model(name, num_classes=n, **options).to(device, memory_format=torch.channels_last).train()


def criterion(name: str, n: int) -> tuple[nn.Module, bool]:
    """The loss as a run with mixup builds it, and whether it takes labels with shares."""
    if name == CROSS_ENTROPY:
        return nn.CrossEntropyLoss(), False
    context = Context(n, 0.0, soft_targets=True, total_epochs=10, class_counts=long_tail(n))
    rehearsal = Rehearsal(LossSpec.resolve(name, OPTIONS.get(name, {})), context)
    return rehearsal.criterion, rehearsal.takes_mixtures()


def step(model: nn.Module, name: str, images: Tensor, target: LabelMixture, n: int) -> Step:
    """One training step: seconds of the loss, and of everything else."""
    device, clock = images.device, CUDA if images.is_cuda else CPU
    loss, mixtures = criterion(name, n)
    timed, given = Timed(loss.to(device)), target if mixtures else target.dense(n)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    def run() -> Sample:
        start = clock.mark()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits = model(images)
            (before, after), gradient = timed(logits, given, clock.mark)
        logits.backward(gradient)
        sgd.step()
        sgd.zero_grad()
        end = clock.mark()
        whole, own = clock.seconds(start, end), clock.seconds(before, after)
        return own, whole - own

    return run


def measure(args: argparse.Namespace, name: str, losses: Sequence[str]) -> list[dict[str, Any]]:
    """Medians of rounds over the losses, on one network; a loss that fails has its ``problem`` in its row."""
    model = network(name, args.classes, args.size, args.device)
    images, target = batch(args.classes, args.batch, args.size, args.device)
    steps: dict[str, Step] = {}
    problems: dict[str, str] = {}
    for loss in tqdm(losses, f"{name}: first steps", disable=None, leave=False):
        try:
            run = step(model, loss, images, target, args.classes)
            run()  # compiles
            steps[loss] = run
        except Exception as error:  # a loss that does not train is a finding, and no reason to stop
            problems[loss] = f"{type(error).__name__}: {error}".splitlines()[0]
            model.zero_grad()
    samples: dict[str, list[Sample]] = {loss: [] for loss in steps}
    interleave(steps, samples, repeats=args.repeats, limit=args.limit)
    return [_row(args, name, loss, samples.get(loss, []), problems.get(loss, "")) for loss in losses]


def _row(args: argparse.Namespace, model: str, loss: str, samples: list[Sample], problem: str) -> dict[str, Any]:
    row = {"model": model, "loss": loss, "batch": args.batch, "size": args.size, "n": args.classes}
    if samples:
        own, whole = Spread.of([first for first, _ in samples]), Spread.of([sum(sample) for sample in samples])
        row |= {"seconds": whole.median, "q1": whole.q1, "q3": whole.q3, "of_loss": own.median}
        row |= {"share": own.median / whole.median, "repeats": len(samples)}
    return {**row, "problem": problem}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows with the largest shares first, and what failed."""
    timed = sorted((row for row in rows if not row["problem"]), key=lambda row: -row["share"])
    lines: list[tuple[str, ...]] = [HEADER]
    for row in timed:
        times = [f"{1e3 * row[part]:.3g}" for part in ("seconds", "of_loss")]
        lines.append((row["model"], row["loss"], *times, f"{row['share']:.2%}", str(row["repeats"])))
    return "\n".join([*aligned(lines), *(f"{row['loss']}: {row['problem']}" for row in rows if row["problem"])])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench steps", description=__doc__)
    parser.add_argument("--models", nargs="+", default=["resnet50", "vit_base_patch16_224"], metavar="NAME")
    parser.add_argument("--losses", nargs="+", metavar="NAME", help="default: all of this distribution")
    parser.add_argument("--device", default="cuda", help="cpu or cuda")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=224, help="side of the images")
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=7, help="rounds over all losses")
    parser.add_argument("--limit", type=float, default=10.0, help="seconds a loss may take")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="the tests' own report, instead of running them")
    parser.add_argument("--json", type=Path, help="write environment and results to this file")
    args = parser.parse_args(argv)
    if not args.junit and not green(TESTS):
        return 1
    tests = {"tests": outcome(args.junit)} if args.junit else {}
    report: dict[str, Any] = {"environment": environment(args.device), **tests, "results": (results := [])}
    for name in args.models:
        rows = measure(args, name, [CROSS_ENTROPY, *(args.losses or names_of_ours())])
        results += rows
        print(f"{table(rows)}\n", flush=True)
        if args.json:
            args.json.write_text(dumps(report))
    return int(any(row["problem"] for row in results))
