"""What a classifier learns by losses of the top k at a large k, beside cross-entropy.

    python -m tests.bench.learned_at_k [--steps 300] [--seeds 5] [--json FILE]

A linear layer on principal components of the built-in data set ``hierarchy``, by AdamW. All runs of a seed start with
the same weights and see the same batches. Each loss has as many trials at each k: its learning rate and temperature are
the best in top-k accuracy on validation images, at a seed that is not reported. Figures are accuracies on test images,
and the difference in top k from cross-entropy, seed by seed, with its standard error.
"""

import argparse
from collections.abc import Sequence
from itertools import product
from statistics import fmean
from typing import Any

import torch
from tqdm import tqdm

from tests.bench.learned import BATCH, Split, add_flags, begin, compared
from tests.bench.report import dumps
from topk_registry import create_loss, get_loss_builder

PLAIN = "ce"
NAMES = (PLAIN, "smooth_topk_svm", "lapsum", "soft_topk")
RATES = (0.01, 0.03, 0.1, 0.3)
HEADER = (
    "| k | loss | rate | tau | top 1, % | top k, % | less cross-entropy, top k |\n"
    "| --- | --- | --- | --- | --- | --- | --- |"
)


def trials(name: str) -> list[dict[str, float]]:
    """Rates and options to choose from; cross-entropy has more rates within the same range instead."""
    grid = getattr(get_loss_builder(name), "tuning_grid", {}).get("tau", ())
    if grid:
        return [{"rate": rate, "tau": tau} for rate, tau in product(RATES, grid)]
    count = 3 * len(RATES)
    ratio = (RATES[-1] / RATES[0]) ** (1 / max(1, count - 1))
    return [{"rate": float(f"{RATES[0] * ratio**place:.3g}")} for place in range(count)]


def trained(name: str, k: int, trial: dict[str, float], split: Split, n: int, steps: int, seed: int) -> torch.nn.Linear:
    """The layer after so many steps; the rate falls to zero by a cosine."""
    torch.manual_seed(seed)
    layer = torch.nn.Linear(split.features.shape[1], n)
    loss = create_loss(name) if name == PLAIN else create_loss(name, k=k, tau=trial["tau"])
    optimizer = torch.optim.AdamW(layer.parameters(), lr=trial["rate"], weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    batches = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        rows = torch.randint(len(split.labels), (BATCH,), generator=batches)
        loss(layer(split.features[rows]), split.labels[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return layer


@torch.no_grad()
def accuracies(layer: torch.nn.Linear, split: Split, k: int) -> tuple[float, float]:
    """Top-1 and top-k accuracy, in percent."""
    best = layer(split.features).topk(k).indices == split.labels[:, None]
    return 100 * best[:, 0].float().mean().item(), 100 * best.any(1).float().mean().item()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.learned_at_k", description=__doc__)
    parser.add_argument("--k", type=int, nargs="+", default=[5, 50])
    add_flags(parser, classes=1000, features=128, images=8, seeds=5)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args(argv)
    splits, report = begin(args)
    with tqdm(total=len(args.k) * sum(len(trials(name)) + args.seeds for name in NAMES), disable=None) as bar:

        def tried(name: str, k: int, trial: dict[str, float], split: str, seed: int) -> tuple[float, float]:
            layer = trained(name, k, trial, splits["train"], args.classes, args.steps, seed)
            bar.update()
            return accuracies(layer, splits[split], k)

        for k in args.k:
            own: list[tuple[float, float]] = []
            for name in NAMES:
                found = [(tried(name, k, trial, "validation", args.seeds)[1], trial) for trial in trials(name)]
                trial = max(found, key=lambda one: one[0])[1]
                runs = [tried(name, k, trial, "test", seed) for seed in range(args.seeds)]
                own = own or runs
                report["results"].append({"k": k, "loss": name, **trial, "validation": found, **compared(runs, own)})
                if args.json:
                    args.json.write_text(dumps(report))
    print(table(report))
    return 0


def table(report: dict[str, Any]) -> str:
    """The results in Markdown."""
    lines = [HEADER]
    for row in report["results"]:
        tops = [f"{fmean(each):.1f}" for each in zip(*row["runs"], strict=True)]
        less = "" if row["loss"] == PLAIN else f"{row['difference']:+.1f} ± {row['error']:.1f}"
        tau = f"{row['tau']:g}" if "tau" in row else ""
        cells = (str(row["k"]), f"`{row['loss']}`", f"{row['rate']:g}", tau, *tops, less)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
