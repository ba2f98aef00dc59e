"""Losses on characters from fonts: ``python -m topk_studies.glyphs --output docs/results/glyphs.json``.

Training, validation and test have different font families. For each condition (number of training families, label
noise) and each loss, the learning rate is chosen by top-5 on the validation families, on a seed that the results do
not use. Then eight further seeds are trained and measured on the test families.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import topk_registry as tr
from topk_registry.data.glyphs import CHARACTERS, Glyphs

LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "ce": ("ce", {}),
    "ce, smoothing 0.1": ("ce", {"smoothing": 0.1}),
    **{f"smooth_topk_svm, k={k}, tau={tau}": ("smooth_topk_svm", {"k": k, "tau": tau})
       for k, tau in ((3, 0.1), (3, 0.3), (3, 1.0), (5, 0.1), (5, 1.0))},
    "topk_nll, k=5": ("topk_nll", {"k": 5}),
    "noised_topk, k=5": ("noised_topk", {"k": 5}),
    "focal": ("focal", {}),
    "generalised_cross_entropy, q=0.3": ("generalised_cross_entropy", {"q": 0.3}),
}  # fmt: skip
FAMILIES = (150, 20, 60)
EVALUATED = 60  # families of the validation and of the test split
NOISES = ("clean", "uniform", "confusion")
SHARE = 0.4  # of the training labels that noise redraws
RATES = (1e-3, 3e-3, 1e-2)
TUNING_SEEDS, SEEDS = (100,), tuple(range(8))
EPOCHS, BATCH = 6, 128
CONFUSED = ("0Oo", "1lIi", "2Zz", "5Ss", "6G", "8B", "9gq", "Cc", "Kk", "Mm", "Pp", "Uu", "Vv", "Ww", "Xx", "Yy")


@dataclass
class Data:
    """Images [N, 1, 28, 28] between -1 and 1, and labels [N]."""

    images: Tensor
    labels: Tensor

    @classmethod
    def of(cls, glyphs: Glyphs, families: int) -> "Data":
        """Return the images of the first so many families."""
        rows = families * len(glyphs.classes)
        images = torch.from_numpy(glyphs.images[:rows, ..., 0].copy())[:, None].float() / -127.5 + 1
        return cls(images, torch.tensor(glyphs.targets[:rows]))


def noisy(labels: Tensor, kind: str, seed: int) -> Tensor:
    """Redraw a share of the labels: over all classes, or within groups of characters that look alike."""
    if kind == "clean":
        return labels
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(len(labels), generator=generator) < SHARE
    if kind == "uniform":
        return torch.where(chosen, torch.randint(62, labels.shape, generator=generator), labels)
    if kind != "confusion":
        raise ValueError(f"noise must be one of {', '.join(NOISES)}, got {kind!r}")
    names = CHARACTERS
    groups = [[names.index(c) for c in group] for group in CONFUSED]
    group_of = {c: group for group in groups for c in group}
    draw = random.Random(seed)
    redrawn = [draw.choice(group_of.get(c, [c])) for c in labels.tolist()]
    return torch.where(chosen, torch.tensor(redrawn), labels)


def network() -> nn.Module:
    """Return three convolutions with batch norm and a linear classifier: 60,000 parameters."""

    def block(before: int, after: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]

    layers = [*block(1, 16, 2), *block(16, 32, 2), *block(32, 64, 2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.1), nn.Linear(64 * 16, 62))


def train(data: Data, loss: str, rate: float, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model, (name, options) = network(), LOSSES[loss]
    smoothing = options.get("smoothing", 0.0)
    criterion = nn.CrossEntropyLoss(label_smoothing=smoothing) if name == "ce" else tr.create_loss(name, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.02, fused=True)
    steps = EPOCHS * (len(data.labels) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.15)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(data.labels)).split(BATCH)[: len(data.labels) // BATCH]:
            optimizer.zero_grad()
            criterion(model(data.images[batch]), data.labels[batch]).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


@torch.no_grad()
def measure(model: nn.Module, validation: Data, test: Data) -> dict[str, float]:
    """Return accuracies in percent, the calibration error of top-1, and the size of sets at 90 % coverage."""
    found: dict[str, float] = {}
    scores = {name: torch.cat([model(part) for part in data.images.split(2000)]).double()
              for name, data in (("validation", validation), ("test", test))}  # fmt: skip
    for split, data in (("validation", validation), ("test", test)):
        rank = (scores[split] > scores[split].gather(1, data.labels[:, None])).sum(1)
        for k in (1, 2, 3, 5):
            found[f"{split}_top{k}"] = 100 * (rank < k).double().mean().item()
    # temperature scaling on the validation families, so that losses with other scales are compared fairly
    grid = torch.logspace(-1.5, 1.5, 61, dtype=torch.double)
    nll = [nn.functional.cross_entropy(scores["validation"] / t, validation.labels).item() for t in grid]
    best = grid[int(np.argmin(nll))]
    p, p_validation = (scores["test"] / best).softmax(1), (scores["validation"] / best).softmax(1)
    found["test_nll"] = nn.functional.cross_entropy(scores["test"] / best, test.labels).item()
    confidence, predicted = p.max(1)
    right = (predicted == test.labels).double()
    order = confidence.argsort()
    bins = zip(confidence[order].chunk(15), right[order].chunk(15), strict=True)
    found["test_ece"] = 100 * sum((c.mean() - r.mean()).abs().item() * len(c) for c, r in bins) / len(right)
    lac = (1 - p_validation.gather(1, validation.labels[:, None])[:, 0]).sort().values
    threshold = lac[min(len(lac), int(np.ceil((len(lac) + 1) * 0.9))) - 1]
    found["test_set_size"] = (1 - p <= threshold).sum(1).double().mean().item()
    found["test_coverage"] = 100 * (1 - p.gather(1, test.labels[:, None]) <= threshold).double().mean().item()
    return found


@dataclass(frozen=True)
class Run:
    families: int
    noise: str
    loss: str
    rate: float
    seed: int


class Runs:
    """Runs by what they are, kept in a file, so that an interrupted study continues."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: dict[Run, dict[str, float]] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                row = json.loads(line)
                self.done[Run(**row["run"])] = row["found"]
        self.validation, self.test = (Data.of(Glyphs(split), EVALUATED) for split in ("validation", "test"))
        self.training: dict[int, Data] = {}

    def __call__(self, run: Run) -> Mapping[str, float]:
        if run not in self.done:
            if run.families not in self.training:
                self.training[run.families] = Data.of(Glyphs("train", families=run.families), run.families)
            clean = self.training[run.families]
            model = train(Data(clean.images, noisy(clean.labels, run.noise, run.seed)), run.loss, run.rate, run.seed)
            self.done[run] = measure(model, self.validation, self.test)
            with self.path.open("a") as file:
                file.write(json.dumps({"run": asdict(run), "found": self.done[run]}) + "\n")
        return self.done[run]

    def tuned(self, families: int, noise: str, loss: str) -> float:
        """Return the rate with the best mean top-5 on the validation families."""
        scores = [np.mean([self(Run(families, noise, loss, rate, seed))["validation_top5"] for seed in TUNING_SEEDS])
                  for rate in RATES]  # fmt: skip
        return RATES[int(np.argmax(scores))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="JSON file of the summary")
    parser.add_argument("--runs", type=Path, help="file of single runs; default: beside the output")
    parser.add_argument("--families", type=int, nargs="+", default=FAMILIES)
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs, started = Runs(args.runs or args.output.with_suffix(".runs.jsonl")), time.time()
    rows = []
    for families in args.families:
        for noise in NOISES:
            for loss in LOSSES:
                rate = runs.tuned(families, noise, loss)
                found = [runs(Run(families, noise, loss, rate, seed)) for seed in SEEDS]
                means = {key: [round(one[key], 4) for one in found] for key in found[0]}
                rows.append({"families": families, "noise": noise, "loss": loss, "rate": rate, "seeds": means})
                shown = " ".join(f"top{k} {np.mean(means[f'test_top{k}']):.2f}" for k in (1, 3, 5))
                print(f"{time.time() - started:6.0f} s  {families:3} {noise:9} {loss:34} {shown}", file=sys.stderr)
    args.output.write_text(
        json.dumps({"protocol": __doc__, "epochs": EPOCHS, "batch": BATCH, "rates": RATES, "rows": rows}, indent=1)
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
