"""What a classifier learns by ``ChunkedUpdate``, in each precision, beside the optimizer's own step.

    python -m tests.bench.learned_updates [--classes 1000] [--steps 600] [--seeds 5] [--json FILE]

A linear layer on principal components of the built-in data set ``hierarchy``, with cross-entropy. All runs of a seed
start with the same weights and see the same batches. The learning rate is the best of a few for the optimizer's own
step, on validation images and at a seed that is not reported; it falls to zero by a cosine. Figures are top-5 accuracy
on test images, and the difference from the optimizer's own step, seed by seed, with its standard error.
"""

import argparse
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch
from tqdm import tqdm

from tests.bench.learned import BATCH, Split, add_flags, begin, compared
from tests.bench.report import aligned, dumps
from topk_registry import ChunkedUpdate, LinearSmoothTopK

K = 5
RATES = {"adamw": (0.003, 0.01, 0.03, 0.1), "momentum": (0.3, 1.0, 3.0, 10.0)}
PLAIN = "the optimizer's own"
WAYS: dict[str, dict[str, Any] | None] = {
    PLAIN: None,
    "float32": {"state": "float32"},
    "bfloat16": {"state": "bfloat16"},
    "int8": {"state": "int8"},
    "bfloat16, bfloat16 weight": {"state": "bfloat16", "weight": torch.bfloat16},
    "int8, bfloat16 weight": {"state": "int8", "weight": torch.bfloat16},
}
HEADER = ("optimizer", "step", "rate", "top 1, %", "top 5, %", "less the own step, top 5", "seeds")


def trained(
    optimizer: str, rate: float, way: dict[str, Any] | None, split: Split, n: int, steps: int, seed: int
) -> LinearSmoothTopK:
    """The layer after so many steps."""
    torch.manual_seed(seed)
    head = LinearSmoothTopK(split.features.shape[1], n, k=1, tau=1.0, alpha=0.0)
    if way and "weight" in way:
        head.weight = torch.nn.Parameter(head.weight.detach().to(way["weight"]))
    made: torch.optim.Optimizer = (
        torch.optim.AdamW(head.parameters(), lr=rate, weight_decay=0.01)
        if optimizer == "adamw"
        else torch.optim.SGD(head.parameters(), lr=rate, momentum=0.9, weight_decay=1e-5)
    )
    if way is not None:
        ChunkedUpdate(made, head, state=way["state"], seed=seed)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(made, steps)
    batches = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        rows = torch.randint(len(split.labels), (BATCH,), generator=batches)
        head(split.features[rows], split.labels[rows]).backward()
        made.step()
        made.zero_grad()
        schedule.step()
    return head


@torch.no_grad()
def accuracies(head: LinearSmoothTopK, split: Split) -> tuple[float, float]:
    """Top-1 and top-5 accuracy, in percent."""
    scores = split.features @ head.weight.float().T + head.bias
    best = scores.topk(K).indices == split.labels[:, None]
    return 100 * best[:, 0].float().mean().item(), 100 * best.any(1).float().mean().item()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.learned_updates", description=__doc__)
    add_flags(parser, classes=1000, features=64, images=20, seeds=5)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--optimizers", nargs="+", choices=RATES, default=list(RATES))
    parser.add_argument(
        "--rates", type=float, nargs="+", help="learning rates to choose from (default: the optimizer's)"
    )
    args = parser.parse_args(argv)
    splits, report = begin(args)
    results: list[dict[str, Any]] = report["results"]
    asked = {name: args.rates or RATES[name] for name in args.optimizers}
    runs = sum(map(len, asked.values())) + len(asked) * len(WAYS) * args.seeds
    with tqdm(total=runs, disable=None) as bar:

        def tried(
            optimizer: str, rate: float, way: dict[str, Any] | None, split: str, seed: int
        ) -> tuple[float, float]:
            head = trained(optimizer, rate, way, splits["train"], args.classes, args.steps, seed)
            bar.update()
            return accuracies(head, splits[split])

        for optimizer, rates in asked.items():
            rate = max(rates, key=lambda one: tried(optimizer, one, None, "validation", args.seeds)[1])
            own: list[tuple[float, float]] = []
            for name, way in WAYS.items():
                found = [tried(optimizer, rate, way, "test", seed) for seed in range(args.seeds)]
                own = own or found
                results.append({"optimizer": optimizer, "way": name, "rate": rate, **compared(found, own)})
                if args.json:
                    args.json.write_text(dumps(report))
    print(table(results))
    return 0


def table(results: list[dict[str, Any]]) -> str:
    lines: list[tuple[str, ...]] = [HEADER]
    for row in results:
        tops = [f"{fmean(each):.2f}" for each in zip(*row["runs"], strict=True)]
        less = "" if row["way"] == PLAIN else f"{row['difference']:+.2f} ± {row['error']:.2f}"
        lines.append((row["optimizer"], row["way"], f"{row['rate']:g}", *tops, less, f"{len(row['runs'])}"))
    return "\n".join(aligned(lines))


if __name__ == "__main__":
    raise SystemExit(main())
