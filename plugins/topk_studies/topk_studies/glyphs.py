"""Study of losses on characters from fonts: ``python -m topk_studies.glyphs --output docs/results/glyphs.json``.

The protocol was fixed before any result on the test split was known, with one exception. After the first results on the
validation split, the learning rates of the grid were raised by one step, because the highest rate was the best.

- Data: The study uses ``topk/glyphs`` with the Latin fonts of 99 Debian packages. The training, validation and test
  splits have different font designs. Each seed selects font families for training, noisy labels and initial weights.
  These are the same for all losses, so differences between losses are paired. The trials are selected by the accuracy
  on all images of the validation split. The results are measured on all images of the test split.
- Training: Each run takes 240 steps of 128 images with AdamW and a one-cycle schedule, for any number of families.
  There is no augmentation. The results use the weights of the last step.
- Noise: A share of 0.4 of the training labels is redrawn. With uniform noise, the new label is drawn from all classes.
  With confusion noise, the new label is drawn from the characters that look like the true character. The new label can
  equal the true label. Validation and test labels have no noise.
- Tuning: For each loss and kind of noise, the study selects the learning rate with the best top-5 accuracy on the
  validation split. For ``smooth_topk_svm`` with k = 5, the study also selects tau. Tuning uses 60 families and a seed
  that no result uses. Runs with other k use the tau of k = 5. Runs with other numbers of families use the learning rate
  and the tau of 60 families.
- Questions: Does ``smooth_topk_svm`` with k = 5 differ from cross-entropy in top-5 and in top-1 accuracy? Does
  ``smooth_topk_svm`` differ from cross-entropy with label smoothing 0.1? Both questions are asked for the default tau
  and for the selected tau, with 60 families and 8 seeds per kind of noise.
- Additional results, with 4 seeds: 20 and 150 families, other k, other losses, and cross-entropy with fewer steps. The
  runs with fewer steps were added after the first results.
- Additional metrics: top-2 accuracy, top-3 accuracy, calibration error, and size of prediction sets at 90 % coverage.
  The last two metrics are measured after temperature scaling on the validation split.
- Intervals: 95 %, by Student's t over the paired differences of the seeds, not corrected for the number of comparisons.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import topk_registry as tr
from topk_registry.files import write_text
from topk_studies.data.glyphs import CHARACTERS, Glyphs
from topk_studies.runner import Runs, paired

FAMILIES, MORE_FAMILIES = 60, (20, 150)
NOISES = ("confusion", "clean", "uniform")
SHARE = 0.4  # share of the training labels that are redrawn
RATES, TAUS = (3e-3, 1e-2, 3e-2), (0.1, 0.3, 1.0)
TUNING_SEED, SEEDS, SIDE_SEEDS = 100, range(8), range(4)
BASELINES = ("ce", "ce, label_smoothing=0.1")
STEPS, FEWER_STEPS, BATCH = 240, (60, 120), 128
CONFUSED = ("0Oo", "1lIi", "2Zz", "5Ss", "6G", "8B", "9gq", "Cc", "Kk", "Mm", "Pp", "Uu", "Vv", "Ww", "Xx", "Yy")


@dataclass
class Data:
    """Images [N, 1, 28, 28] with values from -1 to 1, and labels [N]. The images of a font family are consecutive."""

    images: Tensor
    labels: Tensor

    @classmethod
    def of(cls, split: str) -> "Data":
        glyphs = Glyphs(split)
        images = torch.from_numpy(glyphs.images[..., 0].copy())[:, None].float() / -127.5 + 1
        return cls(images, torch.tensor(glyphs.targets))

    def sample(self, families: int, seed: int) -> "Data":
        """Return the images and labels of randomly chosen font families. ``families`` is the number of these families.

        Raises:
            ValueError: the data has fewer font families.
        """
        total = len(self.labels) // len(CHARACTERS)
        if families > total:
            raise ValueError(f"needs {families} training families, but only {total} are installed")
        chosen = torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:families]
        rows = (chosen[:, None] * len(CHARACTERS) + torch.arange(len(CHARACTERS))).flatten()
        return Data(self.images[rows], self.labels[rows])


def noisy(labels: Tensor, kind: str, seed: int) -> Tensor:
    """Return the labels with label noise. Each label is redrawn with the probability ``SHARE``.

    Args:
        labels: index of the character of each image [N].
        kind: ``"uniform"`` draws the new label from all 62 characters. ``"confusion"`` draws the new label from the
            characters that look like the old character. The new label can equal the old label. ``"clean"`` changes
            nothing.
        seed: seed of the noise.
    """
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
    """Return a network of three convolutions with batch norm and a linear classifier, with 87,000 parameters."""

    def block(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]

    layers = [*block(1, 16), *block(16, 32), *block(32, 64)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.1), nn.Linear(64 * 16, 62))
    return model.to(memory_format=torch.channels_last)  # a third faster than the default format on a CPU


def train(data: Data, run: Mapping[str, Any]) -> nn.Module:
    torch.manual_seed(run["seed"])
    model, options, rate, steps = network(), run["loss_opt"], run["lr"], run.get("steps", STEPS)
    criterion = nn.CrossEntropyLoss(**options) if run["loss"] == "ce" else tr.create_loss(run["loss"], **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.02, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.15)
    epochs = -(-steps * BATCH // len(data.labels))
    order = torch.cat([torch.randperm(len(data.labels)) for _ in range(epochs)])
    for batch in order[: steps * BATCH].split(BATCH):
        optimizer.zero_grad()
        criterion(model(data.images[batch]), data.labels[batch]).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def measure(model: nn.Module, validation: Data, test: Data) -> dict[str, float]:
    """Return the metrics of a trained model on the validation and the test images.

    - ``validation_topK`` and ``test_topK``: top-K accuracy in percent, for K = 1, 2, 3 and 5.
    - ``test_ece``: calibration error of the highest probability, in percent.
    - ``test_set_size``: mean number of classes per prediction set.
    - ``test_coverage``: share of prediction sets that contain the label, in percent.

    Before the last three metrics are computed, the temperature of the softmax is fitted on the validation images. The
    prediction sets are calibrated on the validation images for 90 % coverage.
    """
    found: dict[str, float] = {}
    scores = {name: torch.cat([model(part) for part in data.images.split(2000)]).double()
              for name, data in (("validation", validation), ("test", test))}  # fmt: skip
    for split, data in (("validation", validation), ("test", test)):
        rank = (scores[split] > scores[split].gather(1, data.labels[:, None])).sum(1)
        for k in (1, 2, 3, 5):
            found[f"{split}_top{k}"] = 100 * (rank < k).double().mean().item()
    # temperature scaling, because losses differ in the scale of their logits
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


class Trained:
    """Callable that trains a run and returns its metrics. After ``minutes`` in total, calls raise TimeoutError."""

    def __init__(self, minutes: float) -> None:
        self.end = time.time() + 60 * minutes
        self.train, self.validation, self.test = (Data.of(split) for split in ("train", "validation", "test"))

    def __call__(self, run: Mapping[str, Any]) -> dict[str, float]:
        if time.time() > self.end:
            raise TimeoutError("The time limit is reached. Run the command again to continue.")
        data = self.train.sample(run["families"], run["seed"])
        model = train(Data(data.images, noisy(data.labels, run["noise"], run["seed"])), run)
        return measure(model, self.validation, self.test)


def study(runs: Runs) -> Iterator[tuple[dict[str, Any], range]]:
    """Yield one pair per run of the results: the options, and the seeds. The caller trains the run with these seeds.

    The runs that answer the questions of the protocol come first. Before this function yields a loss, the function
    itself trains the loss with each learning rate and each tau of the grid, and selects the run with the best top-5
    accuracy on the validation split.

    Args:
        runs: storage that also trains runs. This function uses ``runs`` only for tuning: it selects the options with
            the best top-5 accuracy on the validation split.
    """

    def tuned(noise: str, loss: str, *options: Mapping[str, float], **more: Any) -> dict[str, Any]:
        # the run with the options and the learning rate that have the best top-5 accuracy on the validation split
        run = {"noise": noise, "loss": loss, "families": FAMILIES, "seed": TUNING_SEED, **more}
        grid = [{**run, "loss_opt": chosen, "lr": rate} for chosen in options for rate in RATES]
        return max(grid, key=lambda each: runs(each)["validation_top5"])

    main: dict[str, list[dict[str, Any]]] = {}
    for noise in NOISES:
        best = tuned(noise, "smooth_topk_svm", *({"k": 5, "tau": tau} for tau in TAUS))
        default = tuned(noise, "smooth_topk_svm", {"k": 5, "tau": 0.1})
        main[noise] = [tuned(noise, "ce", {}), tuned(noise, "ce", {"label_smoothing": 0.1}), default]
        main[noise] += [best] * (best != default)
        yield from ((run, SEEDS) for run in main[noise])
    for families in MORE_FAMILIES:
        for noise in NOISES:
            for run in (*main[noise][:2], main[noise][-1]):
                yield {**run, "families": families}, SIDE_SEEDS
    for noise in NOISES:
        tau = main[noise][-1]["loss_opt"]["tau"]
        for loss, options in (
            ("smooth_topk_svm", {"k": 2, "tau": tau}),
            ("smooth_topk_svm", {"k": 3, "tau": tau}),
            ("topk_nll", {"k": 5}),
            ("noised_topk", {"k": 5}),
            ("generalised_cross_entropy", {"q": 0.3}),
            ("focal", {}),
        ):
            yield tuned(noise, loss, options), SIDE_SEEDS
        for steps in FEWER_STEPS:
            yield tuned(noise, "ce", {}, steps=steps), SIDE_SEEDS


def summary(runs: Iterable[tuple[Mapping[str, Any], Mapping[str, float]]]) -> list[dict[str, Any]]:
    """Return one row of statistics per loss, kind of noise and number of font families.

    Args:
        runs: pairs of the options of a run and the metrics of this run. Runs for tuning are ignored.

    Returns:
        Rows with the mean and standard deviation of each test metric over the seeds. For each loss in ``BASELINES``, a
        row also has the mean difference from this loss over the same seeds, and the half-width of the 95 % interval.
    """
    cells: dict[tuple[Any, ...], dict[int, Mapping[str, float]]] = {}
    for run, found in runs:
        name = ", ".join([run["loss"], *(f"{key}={value:g}" for key, value in run["loss_opt"].items())])
        if "steps" in run:
            name += f", {run['steps']} steps"
        if run["seed"] != TUNING_SEED:
            cells.setdefault((run["families"], run["noise"], name, run["lr"]), {})[run["seed"]] = found
    baselines = {key[:3]: cell for key, cell in cells.items()}
    rows = []
    for (families, noise, name, rate), cell in cells.items():
        row: dict[str, Any] = {"families": families, "noise": noise, "loss": name, "rate": rate, "n": len(cell)}
        for metric in (key for key in next(iter(cell.values())) if key.startswith("test_")):
            values = [found[metric] for found in cell.values()]
            row[metric] = {"mean": round(fmean(values), 3), "sd": round(stdev(values), 3) if len(values) > 1 else None}
            for baseline in BASELINES:
                other = baselines.get((families, noise, baseline), {})
                seeds = [seed for seed in cell if seed in other]
                if baseline != name and len(seeds) > 1:
                    gap = paired([cell[seed][metric] for seed in seeds], [other[seed][metric] for seed in seeds])
                    row[metric][f"minus {baseline}"] = [round(value, 3) for value in gap.values()]
        rows.append(row)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file of the summary")
    parser.add_argument("--runs", type=Path, required=True, help="file of single runs; continued if it exists")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so many minutes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    trained = Trained(args.minutes)
    runs = Runs(args.runs, trained, lambda line: print(line, file=sys.stderr, flush=True))
    try:
        for run, seeds in study(runs):
            for seed in seeds:
                runs({**run, "seed": seed})
    except TimeoutError as stopped:
        print(stopped, file=sys.stderr)
    images = {split: len(getattr(trained, split).labels) for split in ("train", "validation", "test")}
    rows = summary((json.loads(key), found) for key, found in runs.done.items())
    write_text(args.output, json.dumps({"protocol": __doc__, "images": images, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
