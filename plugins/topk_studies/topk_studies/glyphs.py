"""Losses on characters from fonts: ``python -m topk_studies.glyphs --output docs/results/glyphs.json``.

The protocol was fixed before any result was seen.

- Data: ``topk/glyphs``, the Latin fonts of 99 Debian packages. Training, validation and test have different designs.
  Each seed draws its own training families, noisy labels and weights, which all losses share, so that differences are
  paired. All images of the validation split choose; all images of the test split are reported.
- Training: 240 steps of 128 images for every number of families, AdamW, one cycle, no augmentation; the last weights.
- Noise: a share of 0.4 of the training labels is redrawn over all classes (uniform) or within groups of characters that
  look alike (confusion). Validation and test labels are clean.
- Tuning: per loss and noise, with 60 families, the learning rate (and tau for ``smooth_topk_svm`` with k = 5) with the
  best top-5 on the validation split, on a seed that no result uses. Other k take tau from k = 5; other numbers of
  families take rate and tau from 60.
- Questions, with 60 families and 8 seeds per noise: does ``smooth_topk_svm`` with k = 5 (default tau; tuned tau) differ
  from cross-entropy, and from cross-entropy with label smoothing 0.1, in top-5, and in top-1?
- Described beside them, with 4 seeds: 20 and 150 families (confusion, clean), other k, and other losses; and for all
  runs top-2, top-3, and, after temperature scaling on the validation split, calibration error and size of prediction
  sets at 90 % coverage.
- Intervals: 95 %, Student's t over the seeds of paired differences, not corrected for their number.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

import topk_registry as tr
from topk_registry.data.glyphs import CHARACTERS, Glyphs

FAMILIES, MORE_FAMILIES = 60, (20, 150)
NOISES = ("confusion", "clean", "uniform")
SHARE = 0.4  # of the training labels that noise redraws
RATES, TAUS = (1e-3, 3e-3, 1e-2), (0.1, 0.3, 1.0)
TUNING_SEED, SEEDS, SIDE_SEEDS = 100, range(8), range(4)
STEPS, BATCH = 240, 128
CONFUSED = ("0Oo", "1lIi", "2Zz", "5Ss", "6G", "8B", "9gq", "Cc", "Kk", "Mm", "Pp", "Uu", "Vv", "Ww", "Xx", "Yy")


@dataclass
class Data:
    """Images [N, 1, 28, 28] between -1 and 1, and labels [N], one family after the other."""

    images: Tensor
    labels: Tensor

    @classmethod
    def of(cls, split: str) -> "Data":
        glyphs = Glyphs(split)
        images = torch.from_numpy(glyphs.images[..., 0].copy())[:, None].float() / -127.5 + 1
        return cls(images, torch.tensor(glyphs.targets))

    def sample(self, families: int, seed: int) -> "Data":
        """Return the images of so many random families."""
        total = len(self.labels) // len(CHARACTERS)
        if families > total:
            raise ValueError(f"needs {families} training families, but only {total} are installed")
        chosen = torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:families]
        rows = (chosen[:, None] * len(CHARACTERS) + torch.arange(len(CHARACTERS))).flatten()
        return Data(self.images[rows], self.labels[rows])


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
    """Return three convolutions with batch norm and a linear classifier: 87,000 parameters."""

    def block(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]

    layers = [*block(1, 16), *block(16, 32), *block(32, 64)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.1), nn.Linear(64 * 16, 62))
    return model.to(memory_format=torch.channels_last)  # a third faster on a CPU


@dataclass(frozen=True)
class Run:
    """What is trained: equal runs have equal results."""

    noise: str
    loss: str
    options: tuple[tuple[str, float], ...] = ()
    rate: float = 0.0
    families: int = FAMILIES
    seed: int = TUNING_SEED

    def name(self) -> str:
        return ", ".join([self.loss, *(f"{name}={value:g}" for name, value in self.options)])


def train(data: Data, run: Run) -> nn.Module:
    torch.manual_seed(run.seed)
    model, options = network(), dict(run.options)
    criterion = nn.CrossEntropyLoss(**options) if run.loss == "ce" else tr.create_loss(run.loss, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.rate, weight_decay=0.02, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, run.rate, total_steps=STEPS, pct_start=0.15)
    epochs = -(-STEPS * BATCH // len(data.labels))
    order = torch.cat([torch.randperm(len(data.labels)) for _ in range(epochs)])
    for batch in order[: STEPS * BATCH].split(BATCH):
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
    # temperature scaling, so that losses whose scores have other scales are compared fairly
    grid = torch.logspace(-1.5, 1, 41, dtype=torch.double)
    nll = [nn.functional.cross_entropy(scores["validation"] / t, validation.labels).item() for t in grid]
    best = grid[int(np.argmin(nll))]
    p, p_validation = (scores["test"] / best).softmax(1), (scores["validation"] / best).softmax(1)
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


class Runs:
    """Runs by what they are, kept in a file, so that an interrupted study continues."""

    def __init__(self, path: Path, minutes: float = float("inf")) -> None:
        self.path, self.started, self.minutes = path, time.time(), minutes
        self.done: dict[Run, dict[str, float]] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            row = json.loads(line)
            options = tuple((name, value) for name, value in row["run"].pop("options"))
            self.done[Run(**row["run"], options=options)] = row["found"]
        self.train, self.validation, self.test = (Data.of(split) for split in ("train", "validation", "test"))

    def __call__(self, run: Run) -> Mapping[str, float]:
        if run not in self.done:
            if time.time() - self.started > 60 * self.minutes:
                raise TimeoutError(f"{len(self.done)} runs are done; start again to continue")
            data = self.train.sample(run.families, run.seed)
            model = train(Data(data.images, noisy(data.labels, run.noise, run.seed)), run)
            self.done[run] = measure(model, self.validation, self.test)
            with self.path.open("a") as file:
                file.write(json.dumps({"run": asdict(run), "found": self.done[run]}) + "\n")
            print(f"{time.time() - self.started:6.0f} s, {len(self.done)} runs: {run}", file=sys.stderr)
        return self.done[run]

    def tuned(self, *candidates: Run) -> Run:
        """Return the candidate and rate with the best top-5 on the validation split."""
        grid = [replace(run, rate=rate) for run in candidates for rate in RATES]
        return max(grid, key=lambda run: self(run)["validation_top5"])


def study(runs: Runs) -> Iterator[tuple[Run, range]]:
    """Yield the tuned runs, questions first, and the seeds that each has."""
    main: dict[str, list[Run]] = {}
    for noise in NOISES:
        svm = Run(noise, "smooth_topk_svm")
        tuned = runs.tuned(*(replace(svm, options=(("k", 5), ("tau", tau))) for tau in TAUS))
        default = runs.tuned(replace(svm, options=(("k", 5), ("tau", 0.1))))
        smoothed = Run(noise, "ce", (("label_smoothing", 0.1),))
        main[noise] = [runs.tuned(Run(noise, "ce")), runs.tuned(smoothed), default]
        main[noise] += [tuned] * (tuned != default)
        yield from ((run, SEEDS) for run in main[noise])
    for families in MORE_FAMILIES:
        for noise in NOISES[:2]:
            for run in (*main[noise][:2], main[noise][-1]):
                yield replace(run, families=families), SIDE_SEEDS
    for noise in NOISES:
        tau = main[noise][-1].options[1]
        for k in (2, 3):
            yield runs.tuned(Run(noise, "smooth_topk_svm", (("k", k), tau))), SIDE_SEEDS
        for loss, options in (("topk_nll", (("k", 5),)), ("noised_topk", (("k", 5),)),
                              ("generalised_cross_entropy", (("q", 0.3),)), ("focal", ())):  # fmt: skip
            yield runs.tuned(Run(noise, loss, options)), SIDE_SEEDS


def interval(values: list[float]) -> tuple[float, float]:
    """Return the mean and the half-width of its 95 % interval."""
    half = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5
    return round(float(np.mean(values)), 3), round(float(half), 3)


def summary(runs: Mapping[Run, Mapping[str, float]]) -> list[dict[str, Any]]:
    """Return one row per cell: its mean and deviation, and differences to cross-entropy without and with smoothing."""
    cells: dict[Run, dict[int, Mapping[str, float]]] = {}
    for run, found in runs.items():
        if run.seed != TUNING_SEED:
            cells.setdefault(replace(run, seed=0), {})[run.seed] = found
    baselines = {(run.noise, run.families, run.name()): cell for run, cell in cells.items() if run.loss == "ce"}
    rows = []
    for run, cell in cells.items():
        row: dict[str, Any] = {"families": run.families, "noise": run.noise, "loss": run.name(), "rate": run.rate}
        row["n"] = len(cell)
        for metric in (key for key in next(iter(cell.values())) if key.startswith("test_")):
            values = [found[metric] for found in cell.values()]
            row[metric] = {"mean": round(float(np.mean(values)), 3), "sd": round(float(np.std(values, ddof=1)), 3)}
            for name in ("ce", "ce, label_smoothing=0.1"):
                other = baselines.get((run.noise, run.families, name), {})
                pairs = [cell[seed][metric] - other[seed][metric] for seed in cell if seed in other]
                if name != run.name() and len(pairs) > 1:
                    row[metric][f"minus {name}"] = interval(pairs)
        rows.append(row)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file of the summary")
    parser.add_argument("--runs", type=Path, required=True, help="file of single runs; continued if it exists")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so many minutes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = Runs(args.runs, args.minutes)
    tested = {split: len(data.labels) for split, data in
              (("train", runs.train), ("validation", runs.validation), ("test", runs.test))}  # fmt: skip
    try:
        for run, seeds in study(runs):
            for seed in seeds:
                runs(replace(run, seed=seed))
    except TimeoutError as stopped:
        print(stopped, file=sys.stderr)
    document = {"protocol": __doc__, "images": tested, "rows": summary(runs.done)}
    args.output.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
