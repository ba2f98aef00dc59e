"""Study of all losses on real pictures, with a linear classifier on features of a pretrained network.

Protocol, written before the first test result:

- Data: ``icons`` has 376 names of icons, drawn by people. Each split has other designers. ``fashion`` is
  Fashion-MNIST, ``cifar10n`` is CIFAR-10 with labels by people. Each data set has a pool of at most 10,000 pictures for
  training, 4000 for validation and 5000 for test. ``topk_studies.features`` describes the 256 features of a picture.
- Conditions: ``icons`` with clean labels, and with uniform noise 0.4: each label is redrawn from all classes with
  probability 0.4, and can stay the same. ``fashion`` with clean labels, and with asymmetric noise 0.4: with probability
  0.4, a label is replaced by a wrong answer of a trained model, drawn with the frequency of this answer for the class.
  The model is trained with cross-entropy on the validation split; its answers are counted on the pool. ``cifar10n``
  with the labels ``aggregate`` (majority of three people) and ``worst`` (a wrong label if any of the three is wrong).
  Labels for training and validation have the noise of the condition. Test labels are clean.
- k: 5 on ``icons``, 2 on ``fashion``, 3 on ``cifar10n``. Losses with the option k get this k, except
  ``epsilon_softmax``, whose paper uses k = 1.
- Training: each seed draws 5000 pictures of the pool, the noise, the initial weights and the order of the pictures. A
  run has 6 epochs of batches of 400 with Adam, and the learning rate decreases to 0 by a half cosine. The result is the
  last epoch. ``ldam`` and ``noised_topk_imbalanced`` train a cosine classifier, for which they are designed.
- Sizes: epochs, batch size, learning rates and the scale of the features were chosen with cross-entropy and
  ``smooth_topk_svm`` on validation labels of ``fashion``, on seed 2000. Whitened features were less accurate.
  Few epochs keep the runs short.
- Losses: cross-entropy, with label smoothing 0.1, and at the epoch with the best top-k on validation; timm's ``bce``,
  ``poly`` and ``asl``; all 30 losses of this project with default options; ``smooth_topk_svm`` also with k = [1, k].
  A loss with a ``tuning_grid`` has a second row, "tuned", with all values of the grid.
- Tuning: four learning rates per loss and value of the grid. The trial with the best top-k on validation is selected,
  on seed 1000, which no result uses.
- Seeds: 3 for all rows; 12 for cross-entropy and the twelve rows of ``MAIN``, which are tuned where a grid exists.
  Order: the rows of ``MAIN`` and all rows with default options, then the further seeds of ``MAIN``, then the other
  tuned rows. Seeds run one after another for all rows. If time ends (``--minutes``), the results have fewer seeds, the
  same for all rows of a stage, and stages without results are left out.
- Metrics: top-1, top-k and macro top-k on the test split. Half of the test split fits the temperature of the softmax
  and calibrates prediction sets of 90 % coverage; NLL and mean set size are measured on the other half.
- Tests: for the rows of ``MAIN``, the difference from cross-entropy in top-k over the same seeds, with 95 % intervals
  by Student's t. Holm's method corrects the twelve tests of a condition at the level 0.05. All other numbers are
  descriptive.
- Not part of this study: networks that are trained from scratch, and other test pictures. The intervals do not include
  the choice of the test pictures.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from topk_registry.files import write_text
from topk_registry.registry import get_loss_builder, list_losses
from topk_registry.registry.signatures import accepts, parameters, tuning_grid
from topk_registry.train.loss import Facts, LossSpec, set_epoch
from topk_studies.data.photographs import open_pictures
from topk_studies.features import Features, features_of
from topk_studies.runner import TUNING_SEED, Measured, Runs, heading, say, versions

SHARE = 0.4  # share of the labels with noise
TOP = {"icons": 5, "fashion": 2, "cifar10n": 3}
CONDITIONS = {
    "icons": ("clean", "uniform noise 0.4"),
    "fashion": ("clean", "asymmetric noise 0.4"),
    "cifar10n": ("aggregate", "worst"),
}
COSINE = ("ldam", "noised_topk_imbalanced")
SMOOTHED, STOPPED, BOTH = "ce, label smoothing 0.1", "ce, best epoch", "smooth_topk_svm, k = [1, k]"
MAIN = (SMOOTHED, STOPPED, "smooth_topk_svm", BOTH, "noised_topk", "noised_topk_imbalanced", "log_taylor_softmax")
MAIN += ("encouraging", "topk_nll", "generalised_cross_entropy", "differentiable_topk", "aldr_kl")
METRICS = ("top1", "topk", "macro_topk", "nll", "set_size", "coverage")


@dataclass(frozen=True)
class Row:
    """A row of the results: a loss with fixed options, and the values of other options that tuning tries."""

    name: str
    loss: str
    options: Mapping[str, Any] = field(default_factory=dict)
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    shared: Mapping[str, Any] = field(default_factory=dict)

    @property
    def main(self) -> bool:
        base = self.name.removesuffix(", tuned")
        return base in MAIN and (bool(self.grid) or not tuning_grid(get_loss_builder(self.loss)))

    def trials(self, rates: Sequence[float]) -> list[dict[str, Any]]:
        """Return the flags of each trial: each value of the grid with each learning rate."""
        chosen = [dict(zip(self.grid, values, strict=True)) for values in product(*self.grid.values())]
        return [
            {**self.shared, "loss": self.loss, "loss_opt": {**self.options, **each}, "lr": rate}
            for each in chosen
            for rate in rates
        ]


Stage = tuple[Sequence[Row], range]  # rows, and the seeds of the results of these rows


def rows_of(k: int) -> list[Row]:
    """Return all rows of a data set. The first row is cross-entropy."""
    found = [Row("ce", "ce"), Row(SMOOTHED, "ce", shared={"smoothing": 0.1}), Row(STOPPED, "ce", shared={"stop": True})]
    found += [Row(name, name) for name in ("bce", "poly", "asl")]
    for name in list_losses("topk-registry:*"):
        builder = get_loss_builder(name)
        options = {"k": k} if accepts(builder, "k") and name != "epsilon_softmax" else {}
        shared = {"cosine": True} if name in COSINE else {}
        variants = [(name, options)] + ([(BOTH, {"k": [1, k]})] if name == "smooth_topk_svm" else [])
        for title, each in variants:
            grid = tuning_grid(builder)
            usual = {option: parameters(builder)[0][option].default for option in grid}
            found.append(Row(title, name, {**each, **usual}, shared=shared))
            if grid:
                found.append(Row(f"{title}, tuned", name, each, grid, shared))
    return found


class Classifier(nn.Module):
    """A linear layer, or the cosines between features and class vectors."""

    def __init__(self, d: int, n: int, cosine: bool = False) -> None:
        super().__init__()
        self.layer, self.cosine = nn.Linear(d, n, bias=not cosine), cosine

    def forward(self, x: Tensor) -> Tensor:
        if self.cosine:
            return nn.functional.linear(nn.functional.normalize(x), nn.functional.normalize(self.layer.weight))
        return self.layer(x)


@dataclass(frozen=True)
class Regime:
    """Model and sizes of the runs of a study.

    Args:
        model: function that builds the model for a batch of inputs, a number of classes, and whether the classifier
            computes cosines.
        rates: learning rates of the trials.
        samples: number of pictures that each seed draws.
        epochs, batch: number of epochs, and pictures per batch.
    """

    model: Callable[[Tensor, int, bool], nn.Module]
    rates: tuple[float, ...]
    samples: int
    epochs: int
    batch: int


LINEAR = Regime(lambda x, n, cosine: Classifier(x.shape[1], n, cosine), (2e-3, 8e-3, 3.2e-2, 0.128), 5000, 6, 400)


def train(
    x: Tensor,
    labels: Tensor,
    n: int,
    run: Mapping[str, Any],
    validation: Sequence[Tensor],
    k: int,
    regime: Regime = LINEAR,
) -> tuple[nn.Module, nn.Module]:
    """Train a model, and return the model and the loss. With ``stop``, keep the best epoch on validation.

    Args:
        x: features [N, d] or pictures [N, 1, height, width].
        labels: class of each row of ``x``.
        n: number of classes.
        run: flags of the run: ``loss``, ``loss_opt``, ``lr``, and optionally ``smoothing``, ``stop`` and ``cosine``.
        validation: inputs and labels that select the epoch.
        k: number of answers.
        regime: model and sizes.
    """
    counts = torch.bincount(labels, minlength=n).clamp_min(1).tolist()
    facts = Facts(n, smoothing=run.get("smoothing", 0.0), total_epochs=regime.epochs, class_counts=counts)
    criterion = LossSpec.resolve(run["loss"], run["loss_opt"]).build(facts)
    model = regime.model(x, n, run.get("cosine", False))
    optimizer = torch.optim.Adam(model.parameters(), lr=run["lr"], fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, regime.epochs * -(-len(x) // regime.batch))
    best: tuple[float, dict[str, Tensor]] = (-1.0, {})
    for epoch in range(regime.epochs):
        set_epoch(criterion, epoch)
        model.train()
        for batch in torch.randperm(len(x)).split(regime.batch):
            optimizer.zero_grad()
            criterion(model(x[batch]), labels[batch]).backward()
            optimizer.step()
            schedule.step()
        model.eval()
        if run.get("stop"):
            with torch.no_grad():
                found = hits(model(validation[0]), validation[1], k).mean().item()
            if found > best[0]:
                best = found, {name: value.clone() for name, value in model.state_dict().items()}
    if run.get("stop"):
        model.load_state_dict(best[1])
    return model, criterion


def hits(scores: Tensor, labels: Tensor, k: int) -> Tensor:
    """Return 1.0 where the label is among the k highest scores, else 0.0 [N]. A class that ties counts as higher."""
    return ((scores >= scores.gather(1, labels[:, None])).sum(1) <= k).double()


def measure(scores: Tensor, labels: Tensor, k: int) -> Measured:
    """Return the metrics of test scores [N, n]: accuracies and coverage in percent.

    Even rows fit the temperature and calibrate the prediction sets. Odd rows give ``nll``, ``set_size`` and
    ``coverage``.
    """
    right = hits(scores, labels, k)
    size = torch.zeros(scores.shape[1]).double().index_add(0, labels, torch.ones(len(labels)).double())
    per_class = torch.zeros_like(size).index_add(0, labels, right)[size > 0] / size[size > 0]
    found = {"top1": 100 * hits(scores, labels, 1).mean(), "topk": 100 * right.mean()}
    found["macro_topk"] = 100 * per_class.mean()
    fitted, y = scores[::2], labels[::2, None]
    low, high = -5.0, 5.0  # of the log of the inverse temperature; the NLL is convex in the inverse temperature
    for _ in range(11):
        middle = (low + high) / 2
        p = (fitted * math.exp(middle)).softmax(1)
        slope = (p * fitted).sum(1).mean() - fitted.gather(1, y).mean()
        low, high = (low, middle) if slope > 0 else (middle, high)
    scale = math.exp((low + high) / 2)
    score, cost = -(scores[1::2] * scale).log_softmax(1), -(fitted * scale).log_softmax(1).gather(1, y)[:, 0]
    place = min(len(cost), -(-(len(cost) + 1) * 9 // 10))
    inside = score <= cost.sort().values[place - 1]
    truth = labels[1::2, None]
    found |= {"nll": score.gather(1, truth).mean(), "set_size": inside.sum(1).double().mean()}
    found["coverage"] = 100 * inside.gather(1, truth).double().mean()
    return {name: round(float(value), 4) for name, value in found.items()}


class Trained:
    """Callable that trains a run and returns its metrics. If the scores became NaN or infinite, it returns {}.

    After ``minutes`` in total, calls raise TimeoutError.
    """

    def __init__(
        self, data: Mapping[str, Features], n: int, k: int, minutes: float = math.inf, regime: Regime = LINEAR
    ) -> None:
        self.data = data
        self.n = n
        self.k = k
        self.regime = regime
        self.end = time.time() + 60 * minutes
        self.confusions: Tensor | None = None

    def noisy(self, labels: Mapping[str, Tensor], condition: str, generator: torch.Generator) -> Tensor:
        """Return the labels of a split under a condition."""
        if condition in labels:
            return labels[condition]
        clean = labels["clean"]
        changed = torch.rand(len(clean), generator=generator) < SHARE
        if condition == "uniform noise 0.4":
            return torch.where(changed, torch.randint(self.n, clean.shape, generator=generator), clean)
        if condition != "asymmetric noise 0.4":
            raise ValueError(f"unknown condition {condition!r}")
        self.confusions = self.wrong_answers() if self.confusions is None else self.confusions
        return torch.where(changed, torch.multinomial(self.confusions[clean], 1, generator=generator)[:, 0], clean)

    def wrong_answers(self) -> Tensor:
        """Return the counts of wrong answers to the pool [n, n], by a model that is trained on the validation split."""
        train_on, pool = self.data["validation"], self.data["train"]
        run = {"loss": "ce", "loss_opt": {}, "lr": self.regime.rates[1]}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(TUNING_SEED)
            model, _ = train(train_on.x, train_on.labels["clean"], self.n, run, (), self.k, self.regime)
        truth = pool.labels["clean"]
        with torch.no_grad():
            pairs = truth * self.n + model(pool.x).argmax(1)
        counts = torch.bincount(pairs, minlength=self.n**2).reshape(self.n, self.n).float()
        return counts.fill_diagonal_(0) + 1e-6

    def scores(self, run: Mapping[str, Any], split: str) -> tuple[Tensor, Tensor]:
        """Train a run. Return the predictive logits of a split [N, n], and the labels of validation under the noise."""
        generator = torch.Generator().manual_seed(run["seed"])
        pool, held = self.data["train"], self.data["validation"]
        labels = self.noisy(pool.labels, run["condition"], generator)
        held_labels = self.noisy(held.labels, run["condition"], generator)
        rows = torch.randperm(len(pool.x), generator=generator)[: self.regime.samples]
        torch.manual_seed(run["seed"])
        model, loss = train(pool.x[rows], labels[rows], self.n, run, (held.x, held_labels), self.k, self.regime)
        predictive = getattr(loss, "predictive_logits", lambda scores: scores)
        with torch.no_grad():
            return predictive(model(self.data[split].x)), held_labels

    def __call__(self, run: Mapping[str, Any]) -> Measured:
        if time.time() > self.end:
            raise TimeoutError("The time limit is reached. Run the command again to continue.")
        torch.set_num_threads(1)
        scores, held_labels = self.scores(run, run["val_split"])
        if not torch.isfinite(scores).all():
            return {}
        if run["val_split"] == "validation":
            return {"topk": round(100 * hits(scores, held_labels, self.k).mean().item(), 4)}
        return measure(scores, self.data["test"].labels["clean"], self.k)


def stages_of(rows: Sequence[Row], seeds: int, main_seeds: int) -> list[Stage]:
    """Return the stages of the study: main and default rows, further seeds of the main rows, other tuned rows."""
    main = [row for row in rows if row.main or row.name == "ce"]
    plain = [row for row in rows if row not in main and not row.grid]
    tuned = [row for row in rows if row not in main and row.grid]
    return [(main + plain, range(seeds)), (main, range(seeds, main_seeds)), (tuned, range(seeds))]


def run_study(
    name: str, conditions: Sequence[str], stages: Sequence[Stage], runs: Runs, rates: Sequence[float]
) -> list[dict[str, Any]]:
    """Tune the rows of each stage under each condition, and train the selected trials with the seeds of the stage.

    If ``runs`` raises TimeoutError, return the results of the finished seeds. All rows that are in the same stages have
    the same seeds.

    Returns:
        One dictionary per condition and row, with the selected trial, and the values of each metric by seed.
    """
    shared = {"study": name, "eval_metric": "topk"}

    def trials(condition: str, row: Row) -> list[dict[str, Any]]:
        tuning = {**shared, "condition": condition, "seed": TUNING_SEED, "val_split": "validation"}
        return [{**tuning, **trial} for trial in row.trials(rates)]

    def result(condition: str, row: Row, seed: int) -> dict[str, Any]:
        tried = trials(condition, row)
        values = [found.get("topk", -1.0) for found in runs.all(tried)]
        return {**tried[values.index(max(values))], "seed": seed, "val_split": "test"}

    try:
        for rows, seeds in stages:
            part = list(product(conditions, rows))
            runs.all([trial for cell in part for trial in trials(*cell)])
            for seed in seeds:
                runs.all([result(*cell, seed) for cell in part])
    except TimeoutError as stopped:
        runs.said(str(stopped))

    stages_by_row: dict[str, tuple[int, ...]] = {}
    for i, (rows, _) in enumerate(stages):
        for row in rows:
            stages_by_row[row.name] = (*stages_by_row.get(row.name, ()), i)
    document = []
    for group in dict.fromkeys(stages_by_row.values()):
        part = list(product(conditions, [row for row in stages[group[0]][0] if stages_by_row[row.name] == group]))
        if runs.missing([trial for cell in part for trial in trials(*cell)]):
            continue
        seeds = [seed for i in group for seed in stages[i][1]]
        done = next((i for i in range(len(seeds)) if runs.missing([result(*cell, seeds[i]) for cell in part])), None)
        for condition, row in part if done != 0 else ():
            measured = runs.all([result(condition, row, seed) for seed in seeds[:done]])
            chosen = result(condition, row, seeds[0])
            by_seed = {metric: [one[metric] for one in measured if one] for metric in METRICS}
            about = {"condition": condition, "row": row.name, "main": row.main, "trials": len(row.trials(rates))}
            about |= {key: chosen[key] for key in ("loss", "loss_opt", "lr")} | {"shared": row.shared}
            diverged = sum(not one for one in measured)
            document.append({**about, "seeds": len(measured), "diverged": diverged, **by_seed})
    return document


def main(name: str, args: argparse.Namespace) -> int:
    """Run the study of a data set, and write the results to a JSON file. Return the exit status 0.

    Args:
        name: a key of ``CONDITIONS``.
        args: parsed arguments of the command ``topk-registry study``.

    Raises:
        ValueError: the data or the weights of the network are not there.
    """
    torch.set_num_threads(1)
    pictures, classes = open_pictures(name, args.data_dir)
    trained = Trained(features_of(name, pictures), len(classes), TOP[name], args.minutes)
    stages = stages_of(rows_of(TOP[name]), args.seeds, args.main_seeds)
    return run_and_write(name, CONDITIONS[name], stages, trained, args, __doc__)


def run_and_write(
    name: str,
    conditions: Sequence[str],
    stages: Sequence[Stage],
    trained: Trained,
    args: argparse.Namespace,
    protocol: str | None,
) -> int:
    """Run the stages of a study, and write the results to the file ``args.output``. Return the exit status 0.

    Args:
        name: name of the study.
        conditions: kinds of labels for training.
        stages: rows and seeds.
        trained: callable that trains a run.
        args: parsed arguments of the command.
        protocol: text on the study.
    """
    data = trained.data
    if "asymmetric noise 0.4" in conditions:
        trained.confusions = trained.wrong_answers()  # before other processes start
    state = ", ".join(f"{value:.4f}" for value in (data["train"].x.abs().sum(), data["test"].x.abs().sum()))
    runs = Runs(args.output.with_suffix(".runs.jsonl"), trained, say, args.jobs, state)
    rows = run_study(name, conditions, stages, runs, trained.regime.rates)
    document = {
        **heading(name, protocol),
        "pictures": {split: len(each.x) for split, each in data.items()},
        "classes": trained.n,
        "k": trained.k,
        "versions": versions(),
        "rows": rows,
    }
    parts = {**document, "rows": []}
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    text = json.dumps(parts, indent=1).replace('"rows": []', '"rows": [\n' + lines + "\n ]")
    write_text(args.output, text + "\n")
    say(f"{args.output} has the results")
    return 0
