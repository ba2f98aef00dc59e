"""What output layers learn in the same time: SphericalLinear, adaptive softmax and a dense layer with cross-entropy.

    python -m tests.bench.learned [--seconds 30] [--seeds 3] [--json FILE]

A linear layer on principal components of the built-in data set ``hierarchy`` with many classes. Each contestant gets
the same seconds of one processor, so that other work on the machine changes nothing but the caches. Its learning rate
is the best of a few on validation images, after a tenth of the time each, at a seed that is not reported. Figures are
means over seeds of the layer's start and of the order of the batches, with their standard deviations.
"""

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.bench.report import dumps, environment
from topk_registry import SphericalLinear
from topk_registry.data.hierarchy import Hierarchy
from topk_registry.nn.spherical import SphericalSGD

FINE, BATCH, K = 20, 64, 5
RATES = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0)


@dataclass
class Split:
    features: Tensor  # [N, d]
    labels: Tensor  # [N]


@dataclass
class Contestant:
    """A layer with its loss, its optimiser, and the logarithms of its probabilities [B, n], up to a constant a row."""

    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[float], torch.optim.Optimizer]
    scores: Callable[[Tensor], Tensor]
    likely: bool = True  # whether the scores are logarithms of probabilities


def spherical(name: str) -> Callable[[int, int], Contestant]:
    def make(d: int, n: int) -> Contestant:
        layer = SphericalLinear(d, n, loss=name)
        return Contestant(
            layer,
            lambda rate: SphericalSGD(layer, lr=rate),
            lambda features: layer.to_classifier()(features),
            name != "mse",
        )

    return make


def adaptive(d: int, n: int) -> Contestant:
    layer = nn.AdaptiveLogSoftmaxWithLoss(d, n, cutoffs=[min(2000, n // 5), n // 5 + 1])
    sgd = lambda rate: torch.optim.SGD(layer.parameters(), lr=rate)  # noqa: E731
    return Contestant(lambda h, y: layer(h, y).loss, sgd, layer.log_prob)


def dense(d: int, n: int) -> Contestant:
    layer = nn.Linear(d, n)
    sgd = lambda rate: torch.optim.SGD(layer.parameters(), lr=rate)  # noqa: E731
    return Contestant(lambda h, y: F.cross_entropy(layer(h), y), sgd, layer)


CONTESTANTS: dict[str, Callable[[int, int], Contestant]] = {
    "SphericalLinear, log_taylor_softmax": spherical("log_taylor_softmax"),
    "SphericalLinear, log_spherical_softmax": spherical("log_spherical_softmax"),
    "SphericalLinear, spherical_bound": spherical("spherical_bound"),
    "SphericalLinear, mse": spherical("mse"),
    "AdaptiveLogSoftmaxWithLoss": adaptive,
    "dense, ce": dense,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.learned", description=__doc__)
    add_flags(parser, classes=10_000, features=128, images=8, seeds=3)
    parser.add_argument("--seconds", type=float, default=30.0, help="of one processor, for each contestant")
    args = parser.parse_args(argv)
    splits, report = begin(args)
    print(f"{args.classes} classes, whose log is {math.log(args.classes):.2f}")
    print(f"{'contestant':38} {'rate':>6} {'steps':>7} {'top 1':>15} {f'top {K}':>15} {'nll':>7}")
    for name, make in CONTESTANTS.items():
        row = {"contestant": name, **compare(make, splits, args.classes, args.seconds, args.seeds)}
        report["results"].append(row)
        print(_line(row), flush=True)
        if args.json:
            args.json.write_text(dumps(report))
    return 0


def add_flags(parser: argparse.ArgumentParser, *, classes: int, features: int, images: int, seeds: int) -> None:
    """Add the flags of the data, the seeds and the report."""
    parser.add_argument("--classes", type=int, default=classes)
    parser.add_argument("--features", type=int, default=features)
    parser.add_argument("--images", type=int, default=images, help="to train on, of each class")
    parser.add_argument("--noise", type=float, default=1.0, help="of the images")
    parser.add_argument("--seeds", type=int, default=seeds, help="runs of each contestant at its learning rate")
    parser.add_argument("--json", type=Path, help="write environment and results to this file")


def begin(args: argparse.Namespace) -> tuple[dict[str, Split], dict[str, Any]]:
    """Take one thread from here on; return the data, and a report without results."""
    torch.set_num_threads(1)
    splits = features(args.classes, args.features, args.images, args.noise)
    settings = {name: value for name, value in vars(args).items() if name != "json"}
    return splits, {"environment": environment("cpu"), "settings": settings, "results": []}


def compared(runs: Sequence[tuple[float, float]], own: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Runs of (top 1, top k), one a seed, and how far their top k is from those of ``own``, with its standard error."""
    less = [top - before for (_, top), (_, before) in zip(runs, own, strict=True)]
    error = stdev(less) / math.sqrt(len(less)) if len(less) > 1 else math.nan
    return {"runs": runs, "difference": fmean(less), "error": error}


def _line(row: dict[str, Any]) -> str:
    top1, topk = (f"{row[name]:7.2%} +- {row[name + '_sd']:.2%}" for name in ("top1", "topk"))
    nll = "-" if row["nll"] is None else f"{row['nll']:.2f}"
    return f"{row['contestant']:38} {row['rate']:6g} {row['steps']:7} {top1:>15} {topk:>15} {nll:>7}"


def compare(
    make: Callable[[int, int], Contestant], splits: dict[str, Split], n: int, seconds: float, seeds: int
) -> dict[str, float | None]:
    """Choose the rate on validation images, train for the whole time, and look at test images."""
    d = splits["train"].features.shape[1]

    def trained(rate: float, limit: float, seed: int) -> tuple[Contestant, int]:
        torch.manual_seed(seed)
        contestant = make(d, n)
        return contestant, train(contestant, splits["train"], rate, limit)

    tried = {rate: figures(trained(rate, seconds / 10, seeds)[0], splits["validation"]) for rate in RATES}
    rate = max(RATES, key=lambda each: tried[each]["topk"] or 0.0)
    runs, steps = [], []
    for seed in range(seeds):
        contestant, taken = trained(rate, seconds, seed)
        steps.append(taken)
        runs.append(figures(contestant, splits["test"]))
    found = {name: _mean([run[name] for run in runs]) for name in runs[0]}
    spread = {f"{name}_sd": stdev([run[name] for run in runs]) if seeds > 1 else 0.0 for name in ("top1", "topk")}
    return {"rate": rate, "seeds": seeds, "steps": round(fmean(steps)), **found, **spread}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def train(contestant: Contestant, split: Split, rate: float, seconds: float) -> int:
    """Take steps for this much time of the processor; return how many. A step that diverges is the last."""
    optimizer, steps = contestant.optimizer(rate), 0
    end = time.process_time() + seconds
    while time.process_time() < end:
        rows = torch.randint(len(split.labels), (BATCH,))
        optimizer.zero_grad()
        loss = contestant.loss(split.features[rows].requires_grad_(), split.labels[rows])
        try:
            loss.backward()
            optimizer.step()
        except (ValueError, ArithmeticError):  # a singular step: the layer is as it was
            break
        steps += 1
    return steps


@torch.no_grad()
def figures(contestant: Contestant, split: Split) -> dict[str, float | None]:
    """Accuracies, and the mean negative log-likelihood; None without probabilities."""
    hits, nll = torch.zeros(2), 0.0
    for features, labels in zip(split.features.split(512), split.labels.split(512), strict=True):
        scores = contestant.scores(features).double()
        best = scores.topk(K, -1).indices == labels[:, None]
        hits += torch.stack((best[:, 0].sum(), best.any(-1).sum()))
        nll += float(F.cross_entropy(scores, labels, reduction="sum"))
    top1, topk = (hits / len(split.labels)).tolist()
    return {"top1": top1, "topk": topk, "nll": nll / len(split.labels) if contestant.likely else None}


def features(n: int, d: int, images: int, noise: float) -> dict[str, Split]:
    """The principal components of the images, of mean square 1, by those of the training images."""
    sizes = {"train": images * n, "validation": max(n // 5, 200), "test": max(n // 2, 500)}
    drawn = {
        name: Hierarchy(name, size=size, superclasses=n // FINE, fine=FINE, pixel_noise=noise)
        for name, size in sizes.items()
    }
    some = _pixels(drawn["train"])[:: max(1, sizes["train"] // 4000)]
    mean = some.mean(0)
    axes = torch.linalg.svd(some - mean, full_matrices=False).Vh[:d]
    split = {name: Split((_pixels(data) - mean) @ axes.T, torch.tensor(data.targets)) for name, data in drawn.items()}
    scale = split["train"].features.square().mean().sqrt()
    return {name: Split(each.features / scale, each.labels) for name, each in split.items()}


def _pixels(data: Hierarchy) -> Tensor:
    return torch.from_numpy(data.images).flatten(1).float() / 255


if __name__ == "__main__":
    raise SystemExit(main())
